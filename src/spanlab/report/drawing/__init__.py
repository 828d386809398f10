"""What all figures share: style, scales, labels, files."""
