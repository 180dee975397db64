"""Who works on a run: processes that share out its blocks by leases, and those that one command starts on a machine.
Here belongs how work is shared among processes, not what is done with it.
"""
