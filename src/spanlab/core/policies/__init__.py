"""Policies, one family per file; each implements the protocol `spanlab.core.protocol.Policy`."""
