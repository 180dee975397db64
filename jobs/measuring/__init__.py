"""How fast this machine is: `jobs.measure`, its doubts and its table. Here belongs what turns probes into a profile."""
