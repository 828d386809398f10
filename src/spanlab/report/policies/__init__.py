"""Tables and the figure of the analysis `policies`."""
