"""Scheduler, prefix store and reuse policies in plain Python and NumPy: token ids, ranges, bytes
and `now`."""
