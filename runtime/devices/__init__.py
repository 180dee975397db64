"""Sessions of several ranks that compute one run together, in three ways, and what they tell one another. Who is there
and how bytes go between them is `ranks/`; what one process does is `engine/session.py`."""
