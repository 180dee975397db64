"""Reports about runs, from their files: a table that compares runs, an HTML page about one run, and its progress."""
