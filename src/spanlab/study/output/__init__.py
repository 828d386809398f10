"""What a run leaves: its folder, files of arms, logs, provenance, report."""
