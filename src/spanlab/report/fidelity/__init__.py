"""Tables and figures of calibrations, and of comparisons between engine and simulator."""
