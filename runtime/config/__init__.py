"""What a run is asked to do, typed, frozen and validated: Hydra's groups, sampling, profiles of machines, orders of
lanes. Here belong values and their checks; it imports nothing but errors.
"""
