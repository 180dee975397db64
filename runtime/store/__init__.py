"""Files as bytes: validated safetensors and GGUF headers, direct reads of extents, KV pages on disk."""
