"""Inspects a transformers class without its weights: layers, attention, and behavior in packed and padded lanes.

A lane is a micro-batch that runs through the model's own forward. A packed lane has the tokens of all its sequences in
one row without padding; a padded lane has one left-padded row per sequence."""
