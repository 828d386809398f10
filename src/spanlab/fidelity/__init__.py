"""How well the simulator predicts the engine: the same arrivals through both, and the gap in numbers."""
