"""What lies on disk of a run: its directory, manifest, plan, parts and checkpoint, and its copy in an object store.
Here belongs what reads and writes those files, whoever computes the rows; it loads no torch.
"""
