"""Runs beside each other as a table, and one run as a page. Here belongs what reads finished work and tells of it."""
