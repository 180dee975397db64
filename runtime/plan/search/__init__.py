"""Policy search: a grid of candidate policies, a roofline model that ranks them, and full plans of the best ones."""
