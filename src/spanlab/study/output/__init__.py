"""Output of a run: its folder, files of arms, logs, provenance, report."""
