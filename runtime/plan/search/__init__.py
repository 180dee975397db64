"""Which policy is best: the grid of candidates, the hierarchical roofline that ranks them, and the finalists that are
planned whole. Here belongs what compares possible plans; none of it makes the plan that a run follows.
"""
