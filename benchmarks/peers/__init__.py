"""Alternatives to Weightstream, each run as its users would run it. A module measures one library as a worker
(`answers`), some in a virtual environment with that library."""
