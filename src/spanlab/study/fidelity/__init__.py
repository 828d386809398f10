"""Calibration of timing models, and comparison of simulator and engine."""
