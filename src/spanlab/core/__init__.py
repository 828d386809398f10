"""The policy heart: plain Python and NumPy; knows token ids, ranges, bytes and `now`."""
