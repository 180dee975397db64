"""OpenAI's Files and Batches routes over run directories. Here belongs what receives files, keeps batches and starts
their jobs; a batch is a run like any other, in a process of its own.
"""
