"""The simulator: SimPy owns time and queueing, timing models say how long a step takes, the core decides."""
