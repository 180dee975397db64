"""How files are published: whole or not at all, readable by whom the user says, by one process at a time, and with a
digest. Here belongs what knows files but not what is in them.
"""
