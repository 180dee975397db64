"""Batching: groups requests by length and shared prompt prefix into blocks and micro-batches, and decides before each
pass of continuous batching which requests run. Pure functions of lengths and prefixes."""
