"""Triton kernels for position-independent attention, each beside the torch reference that says what it computes."""
