"""The analysis `twin`: a server model fitted to a log, and its prediction errors on held-out requests."""
