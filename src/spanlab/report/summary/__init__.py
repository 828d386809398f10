"""Tables of the analysis `summary`."""
