"""Bars of the analysis `bars`: their names, and what a study must be for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanlab.checks import one_of
from spanlab.registry import Registry

if TYPE_CHECKING:
    from spanlab.analysis.bars import Verdict
    from spanlab.settings.study import Study

#: Functions of a finished study and the name of an arm; `spanlab.study.analyses.bars` holds ours.
BARS: Registry[Sequence[Verdict]] = Registry("bars", given=("finished", "arm"))
_REORDERED = "repeated_documents"  # the workload whose orders are known
for _name in ("prefill_speedup", "expected_prefix", "computed_once", "near_infinite", "thrash", "beyond_whole_prompts"):
    BARS.later(_name, "spanlab.study.analyses.bars")


def check_bars(study: Study) -> None:
    """Refuse bars and arms that there are not, and workloads that a bar does not know."""
    if "bars" not in study.chosen_analyses():
        return
    if not study.bars:
        raise ValueError("bars={} with analyses=bars: expected arms of a bar, as in bars.near_infinite=[radix]")
    for name, arms in study.bars.items():
        one_of("bars", name, BARS)
        for arm in arms:
            one_of(f"bars.{name}", arm, study.arms)
    if "expected_prefix" in study.bars and study.workload.kind != _REORDERED:
        raise ValueError(f"bars.expected_prefix with workload.kind={study.workload.kind}: expected {_REORDERED}")
    if "prefill_speedup" in study.bars:
        _check_alone(study)
    if "thrash" in study.bars and study.model.is_hybrid:
        raise ValueError(
            f"bars.thrash with model.name={study.model.name}: expected attention layers alone, for it counts KV"
        )
    if "beyond_whole_prompts" in study.bars and len(found := whole_prompt_arms(study)) != 1:
        told = ", ".join(found) or "none"
        raise ValueError(f"bars.beyond_whole_prompts with {told} of policy=exact_hash: expected one such arm that runs")


def whole_prompt_arms(study: Study) -> list[str]:
    """The arms that run and find whole prompts alone."""
    return [name for name in study.chosen() if study.arms[name].policy_name == "exact_hash"]


def _check_alone(study: Study) -> None:
    """Speedups of prefills are those of requests that share the device with no other."""
    if study.arrivals.clients != 1:
        clients = f"arrivals.clients={study.arrivals.clients}"
        raise ValueError(f"bars.prefill_speedup with {clients}: expected arrivals=closed_loop with 1")
    if study.baseline not in study.chosen():
        raise ValueError(f"bars.prefill_speedup with baseline={study.baseline}: expected one of the arms that run")
