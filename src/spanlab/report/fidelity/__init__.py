"""Tables and figures of calibrations, and of engine beside simulator."""
