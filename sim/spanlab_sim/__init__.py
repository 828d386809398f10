"""The simulator: SimPy provides time and queueing, timing models the duration of steps, the core
all decisions."""

from spanlab import compiled  # noqa: F401 - decides whether the modules of this package are compiled
