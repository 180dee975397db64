"""A run's output as one file, in the order of its input. Here belongs what reads parts and writes what others take."""
