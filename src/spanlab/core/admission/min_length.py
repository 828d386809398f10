"""Admission by length: short prefixes save too little to be worth an entry."""

from __future__ import annotations

from spanlab.checks import positive
from spanlab.core.admission.contract import ADMISSIONS, Admission, Rule


@ADMISSIONS.register("min_length")
def min_length(tokens: int = 256) -> Admission:
    """A prefix or span that is shorter than `tokens` is not kept."""
    positive("admission_options.tokens", tokens)
    return Rule(lambda computed: computed.stop if len(computed.tokens) >= tokens else 0)
