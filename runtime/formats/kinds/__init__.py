"""The storage formats. Each module here is discovered; it defines `FORMATS`, and `METHODS` if configs name it or its
tensors are named differently from the weight. Code for one format belongs here, shared code one folder up.
"""
