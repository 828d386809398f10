"""Where and how arms run: executors, workers, cells, jobs, backends."""
