"""Cost model: predicts seconds from bytes and FLOPs, with machine rates, the work of lanes and stages, a simulator."""
