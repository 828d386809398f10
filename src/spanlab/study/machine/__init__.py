"""The machine that an engine study runs on, and its noise."""
