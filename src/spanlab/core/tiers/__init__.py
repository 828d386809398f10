"""Tiers of memory below the device's: what they hold, and what moves between them."""
