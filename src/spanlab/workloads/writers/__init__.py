"""Workloads out: requests as lines of the traces and request files that other tools replay."""
