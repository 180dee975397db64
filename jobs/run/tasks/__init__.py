"""What is asked of a row, and what becomes of the answer: completions, scores, encodings, and turns of chats. Here
belongs what one task has and the others do not.
"""
