"""Entries that are programs of their own, and no study."""
