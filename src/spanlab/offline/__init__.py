"""Offline bounds on reuse: what no cache of a given memory could exceed in the order of one run."""
