"""The Triton models: thin adapters from Triton requests to the packages beside them."""
