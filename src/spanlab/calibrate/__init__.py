"""Measuring how long steps take on the engine, and fitting the simulator's prices to it."""
