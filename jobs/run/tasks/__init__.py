"""Tasks of a run: completions, scores, encodings, and turns of chats. A module has the code of one task only."""
