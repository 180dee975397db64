"""What a user starts: each module of this folder is one job, `python -m jobs.NAME`, a short door; `__main__.py` is the
command over them. The rooms hold what the jobs do; no room imports a door.
"""
