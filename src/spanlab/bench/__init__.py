"""What benchmarks on the real engine share: a model with its memory, sessions over it, rates, bounds, rows, spreads."""
