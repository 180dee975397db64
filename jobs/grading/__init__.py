"""Grades finished runs: metrics per row, by references or a judge's ratings, and means with confidence intervals."""
