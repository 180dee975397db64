"""Sessions of several ranks (sharded, tensor or pipeline) and their messages. The transport is in `ranks/`, the session
of one process in `engine/session.py`."""
