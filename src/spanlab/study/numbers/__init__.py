"""Records of an arm to numbers: summary, bounds, loads."""
