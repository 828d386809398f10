"""Entries that are not studies: separate programs."""
