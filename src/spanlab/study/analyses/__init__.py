"""Analyses of a finished study in one file each; `explain`, `plan`, `twin` and `fidelity` hold the larger ones."""
