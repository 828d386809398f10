"""Tables and figures of studies: one figure per file; every number is from the summary or the
records."""
