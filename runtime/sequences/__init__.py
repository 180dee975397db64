"""Running sequences (requests that are being computed): state, sampling, beam search, grammars, stop strings,
detokenization, scores of target tokens, and vectors."""
