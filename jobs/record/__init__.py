"""The files of a run: its directory, and its copy in an object store. Loads no torch.

- manifest: run.json, the settings and digests that identify a run
- plan: plan.parquet, the block and position of each output row
- block: the sequences that are decoded together; part: the Parquet file with the rows of a block
- pass: one forward through the model; its statistics are rows of `throughput/`
- checkpoint: the tokens of unfinished sequences
- window: the rows of a large input that are planned and run together
"""
