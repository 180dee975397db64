"""Reports about runs, from their files: a table that compares them, an HTML page of one, and progress."""
