"""The cost model: rates of a machine, the work of lanes and stages, and the simulator that runs a schedule on them.
Only what turns bytes and FLOPs into seconds belongs here.
"""
