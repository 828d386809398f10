"""Policies, one family a file, behind the protocol `spanlab.core.protocol.TreePolicy`."""
