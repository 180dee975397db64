"""The cost model, from bytes and FLOPs to seconds: machine rates, the work of lanes and stages, and the simulator."""
