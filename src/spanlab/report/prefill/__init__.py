"""Table and figures of `analysis.prefill`."""
