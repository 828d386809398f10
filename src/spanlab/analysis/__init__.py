"""Functions of tables: errors of predictions, equivalence, ranks, goals, fits of timing models."""
