"""Files as bytes: validated headers of safetensors and GGUF, background reads of byte ranges, KV pages on disk, and
writers of safetensors."""
