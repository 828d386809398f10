"""Analyses of finished studies, each registered in a file of this package."""

from spanlab.analyses import (  # noqa: F401
    answers,
    bars,
    compare_backends,
    decay,
    explain,
    families,
    fit_profile,
    methods,
    perfect_eviction,
    plan,
    plan_searches,
    policies,
    prefill,
    rendezvous,
    replicas,
    serving,
    state_ratio,
    summary,
    tiers,
    twin,
)
