"""Shared code of all figures: style, scales, labels, files."""
