"""Running sequences: their state, sampling, beam search, grammars, stop strings, detokenization, scores and vectors."""
