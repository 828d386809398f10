"""Real servers that a study starts by itself, their scripts, and the log of their steps."""
