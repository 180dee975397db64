"""Files: validated safetensors and GGUF headers, direct reads of extents, and KV pages on disk. Bytes only, whatever
they mean.
"""
