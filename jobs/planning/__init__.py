"""Plans without weights and without the machine: plans, sweeps around them, shapes of published models and the table
of supported families. Code that answers before a run belongs here."""
