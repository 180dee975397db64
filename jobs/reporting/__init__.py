"""Runs beside each other as a table, one run as a page, and how far a run is. Here belongs what reads the files of
runs, finished or not, and tells people of them.
"""
