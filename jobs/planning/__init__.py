"""What a run would take, without weights and without its machine: plans, sweeps around them, the shapes of published
models and the table of what is supported. Here belongs what answers before a run.
"""
