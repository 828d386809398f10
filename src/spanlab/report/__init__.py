"""Records to tables and figures: one figure per file, every number from the summary or the records."""
