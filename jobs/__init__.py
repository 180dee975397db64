"""Commands of Weightstream: each module of this folder is one job, `python -m jobs.NAME`; `__main__.py` dispatches to
them. The packages contain their implementation and do not import the commands."""
