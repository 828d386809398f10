"""Offline bounds on reuse: limits for every cache of a given memory, in the order of one run."""
