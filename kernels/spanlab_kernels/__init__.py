"""Triton kernels for position-independent attention, each with a torch reference that defines its result."""
