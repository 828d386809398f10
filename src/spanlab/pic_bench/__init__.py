"""Position-independent caching measured on the real engine: documents asked about again, in other orders."""
