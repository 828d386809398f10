"""Calibration of timing models, and the simulator beside the engine."""
