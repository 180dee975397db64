"""What attention takes beside the tokens of a lane and their cache, for each way that it is computed."""

from ..units import MIB

GATHERED_BYTES = 128 * MIB  # of keys and values that an accelerator gathers at a time; the longest row may take more
SCORED_BYTES = 16 * MIB  # of those whose scores no kernel makes: float32 copies take as much again or twice
