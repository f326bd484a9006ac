"""The language decoder: continuous batching over a paged KV cache."""
