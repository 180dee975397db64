"""Files: safetensors and GGUF headers that are trusted in nothing, extents read past the page cache, and pages of
keys and values on disk. Here belongs what reads and writes bytes and does not know what they mean.
"""
