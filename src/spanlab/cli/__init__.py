"""The command line: its words, what they may be, and the environment that a run needs."""
