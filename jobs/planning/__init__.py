"""Planning without weights and without the machine: plans, sweeps, shapes of published models, and the table of
supported families."""
