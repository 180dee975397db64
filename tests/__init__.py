"""What libraries read of the environment once, when they are loaded: here, as this is imported before all else."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never look for a network
os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that they start
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin while they wait take the cores from the other processes
