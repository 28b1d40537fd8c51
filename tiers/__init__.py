"""Where bytes live: extents of a GGUF file, page frames, direct reads, residency and the KV cache."""
