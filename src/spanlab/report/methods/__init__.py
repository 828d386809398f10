"""Tables and figures of the analysis `methods`."""
