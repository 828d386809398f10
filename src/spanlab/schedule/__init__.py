"""Schedules of given requests, step by step, to compare with another scheduler's."""
