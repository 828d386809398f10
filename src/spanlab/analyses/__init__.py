"""Statistics over records and tables: prediction errors, equivalence, ranks, goals, fits of timing models."""
