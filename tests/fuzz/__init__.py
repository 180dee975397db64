"""Files that a stranger wrote, many of them: `python -m tests.fuzz seconds=60 [targets=config,gguf] [seed=0]`.

mutate.py       from bytes and from JSON to what is nearly that
target.py       what a target is: cases made from a number, and what is done with one
headers.py datasets.py checkpoints.py weights.py grammars.py runs.py     the targets
child.py        runs cases of one target in a process of its own
watch.py        starts children, ends one that hangs, counts

A case is a finding when it raises what is not of our family, takes more than ten seconds, grows by more than 1 GiB,
ends the process, or is accepted with values that lie outside of its files.
"""
