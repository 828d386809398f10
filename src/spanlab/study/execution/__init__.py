"""Execution of arms: executors, workers, cells, jobs, backends."""
