"""Worker processes: sharing of a run's blocks by leases, and starting several workers on one machine."""
