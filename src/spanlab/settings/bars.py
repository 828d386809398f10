"""Registered acceptance bars of the analysis `bars`, and the checks that each of them needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanlab.checks import one_of
from spanlab.registry import Registry
from spanlab.settings.arms import check_names

if TYPE_CHECKING:
    from spanlab.analysis.bars import Verdict
    from spanlab.settings.study import Study

#: Functions of a finished study and the name of an arm; `spanlab.study.analyses.bars` holds ours.
BARS: Registry[Sequence[Verdict]] = Registry("bars", given=("finished", "arm"))
_REORDERED = "repeated_documents"  # the workload whose orders are known
for _name in ("prefill_speedup", "expected_prefix", "computed_once", "near_infinite", "thrash", "beyond_whole_prompts"):
    BARS.later(_name, "spanlab.study.analyses.bars")


def check_bars(study: Study) -> None:
    """Raise ValueError for unknown bars and arms, and for workloads that a bar does not support."""
    is_read = "bars" in study.chosen_analyses()
    for name, arms in study.bars.items():
        one_of("bars", name, BARS)
        check_names(f"bars.{name}", arms, study.arms, is_read)
    if not is_read:
        return
    if not study.bars:
        raise ValueError("bars={} with analyses=bars: expected arms of a bar, as in bars.near_infinite=[radix]")
    if "expected_prefix" in study.bars and study.workload.kind != _REORDERED:
        raise ValueError(f"bars.expected_prefix with workload.kind={study.workload.kind}: expected {_REORDERED}")
    if "prefill_speedup" in study.bars:
        _check_alone(study)
    if "thrash" in study.bars and study.model.is_hybrid:
        raise ValueError(
            f"bars.thrash with model.name={study.model.name}: expected attention layers alone, for it counts KV"
        )
    if "beyond_whole_prompts" in study.bars and len(arms := whole_prompt_arms(study)) != 1:
        names = ", ".join(arms) or "none"
        raise ValueError(
            f"bars.beyond_whole_prompts with {names} of policy=exact_hash: expected one such arm that runs"
        )


def whole_prompt_arms(study: Study) -> list[str]:
    """Return the arms that run and match whole prompts only."""
    return [name for name in study.chosen() if study.arms[name].policy_name == "exact_hash"]


def _check_alone(study: Study) -> None:
    """Raise ValueError where requests share the device, for the bar compares single prefills."""
    if study.arrivals.clients != 1:
        clients = f"arrivals.clients={study.arrivals.clients}"
        raise ValueError(f"bars.prefill_speedup with {clients}: expected arrivals=closed_loop with 1")
    if study.baseline not in study.chosen():
        raise ValueError(f"bars.prefill_speedup with baseline={study.baseline}: expected one of the arms that run")
