"""The analysis `explain`: reuse of a log, the causes of lost tokens, and fixes."""
