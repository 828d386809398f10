"""Tables and figures of the entries of the probe."""
