"""Request logs of other systems."""
