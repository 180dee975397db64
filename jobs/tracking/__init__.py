"""What a run tells other programs: curves and results for trackers, metrics for Prometheus, a command at its end."""
