"""The simulator: SimPy owns time and queueing, timing models say how long a step takes, the core decides."""

import spanlab  # noqa: F401 - which decides whether the modules of this package are compiled
