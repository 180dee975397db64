"""Runs of several ranks, the processes that compute one run together (sharded, tensor or pipeline): sessions, messages
and synchronization. The transport is in `ranks/`, the session of a single process in `engine/session.py`."""
