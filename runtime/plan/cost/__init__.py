"""How long things take: a machine's rates, the work of lanes and stages, and the simulator that plays a schedule on
them. Here belongs what turns bytes and FLOPs into seconds.
"""
