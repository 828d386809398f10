"""The analysis `explain`: what a log says about reuse, what it is lost to, and what would help."""
