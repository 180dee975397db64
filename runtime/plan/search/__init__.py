"""Policy search: the grid of candidates, the hierarchical roofline that ranks them, and finalists planned in full."""
