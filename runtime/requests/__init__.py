"""Makes requests from prompts, chats and targets, or rejects them with a reason; merges requests that are computed
together. Code that needs a tokenizer belongs here."""
