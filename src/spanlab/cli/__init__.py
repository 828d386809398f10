"""The command line: its arguments, the listing of choices, and the environment that a run needs."""
