"""Sessions of several ranks that compute one run together, each way in a module of its own, and what they tell one
another. Who is there and how bytes go between them is `ranks/`; what one process does is `session.py`."""
