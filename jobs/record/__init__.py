"""Files of a run on disk: directory, manifest, plan, parts, checkpoint, and the copy in an object store. Loads no
torch."""
