"""Converts prompts, chats and scoring targets to requests for the engine, or rejects them with a reason. Also merges
requests that are computed together. Code that needs a tokenizer belongs here."""
