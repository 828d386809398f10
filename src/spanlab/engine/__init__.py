"""The real backend: a transformers model, our own paged keys and values, and the same scheduler as the simulator's."""
