"""The library's API, `Runtime`: prompts in; completions, scores and embeddings out. Code that converts inputs to
requests and completions to results belongs here."""
