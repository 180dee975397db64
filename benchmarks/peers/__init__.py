"""Alternatives to Weightstream, run as their users would. Each module measures one library as a worker (`answers`)."""
