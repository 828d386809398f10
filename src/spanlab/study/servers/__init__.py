"""Real servers that a study starts by itself, one per file."""
