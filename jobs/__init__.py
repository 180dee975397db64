"""Commands of Weightstream: each module is a job, `python -m jobs.NAME`; `__main__.py` dispatches to them. The packages
contain their implementation and do not import commands."""
