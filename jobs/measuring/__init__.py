"""Measures the speed of this machine for `jobs.measure`: probes, plausibility checks and the profile."""
