"""What is asked of a model: requests made of prompts, chats and targets, or why there is none. Here belongs what needs
a tokenizer, and what joins requests that are computed together; what became of a request is told by its sequence.
"""
