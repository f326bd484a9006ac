"""Embeddings between processes: a store in shared memory, and handles to its slots."""
