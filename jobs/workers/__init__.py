"""Worker processes: they share a run's blocks by leases; one command can start several on a machine."""
