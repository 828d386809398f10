"""The real backend: a transformers model on a paged KV pool, driven by the same scheduler as the
simulator."""
