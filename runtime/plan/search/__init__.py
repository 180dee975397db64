"""Policy search: the grid of candidates, the hierarchical roofline that ranks them, and the finalists that are planned
in full. Only what compares possible plans belongs here; none of it makes the plan of a run.
"""
