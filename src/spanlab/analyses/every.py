"""Imports every analysis, so that each is registered; entries and reports list them in this order."""

from spanlab.analyses import (  # noqa: F401, I001 - in the order of lists
    summary,
    families,
    policies,
    bars,
    state_ratio,
    break_even,
    perfect_eviction,
    compare_backends,
    fit_profile,
    serving,
    prefill,
    answers,
    methods,
    tiers,
    replicas,
    decay,
    explain,
    plan,
    plan_searches,
    twin,
)
