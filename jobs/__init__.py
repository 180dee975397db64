"""What a user starts: each module of this folder is one job, `python -m jobs.NAME`, a door of under 60 lines. The rooms
hold what the jobs do; no room imports a door.
"""
