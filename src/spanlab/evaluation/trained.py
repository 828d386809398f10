"""Accuracy means something only where the weights do."""

from __future__ import annotations


def require_trained(weights: str) -> None:
    """Refuse to score answers of a model whose weights are random."""
    if weights == "random":
        raise ValueError(
            "weights=random: expected trained weights (hub or path) for accuracy; "
            "KL and top-1 agreement with full recompute run with random ones too"
        )
