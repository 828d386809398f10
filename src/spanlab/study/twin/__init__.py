"""The analysis `twin`: a server fitted to its own log, and how well it predicts requests that the fit did not see."""
