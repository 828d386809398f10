"""The analysis `tiers`: loaded and declined tokens by arm, traffic by tier, and the break-even length of loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from spanlab import build
from spanlab.build.tiers import build_prefill_time, tiers_of
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.tiers.link import Link
from spanlab.core.tiers.load import overlapped
from spanlab.core.tiers.rules import TierRules
from spanlab.report.analyses.tiers import arms_table, break_even_table, points_table, tiers_table
from spanlab.report.analyses.tiers_figure import draw_tiers
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import findings_by_axis
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers.results import ArmResult
from spanlab.study.output.arm_files import Cell
from spanlab_sim.prefill_time import PrefillTime, break_even_tokens


@ANALYSES.register("tiers")
def tiers_of_study(finished: Finished) -> Findings:
    """Return loads by arm, traffic by tier, and the break-even length of each tier."""
    study = finished.study
    arms = {result.data.name: _arm(finished, result) for result in finished.results}
    least = break_even(study)
    entry = {"break_even_tokens": least, "arms": arms}
    caveats = _caveats(study)
    rules = {name: vars(tier) for name, tier in study.store.tiers.items()}
    return Findings(
        summary={"tiers": entry},
        tables=(arms_table(arms, caveats), break_even_table(rules, least), tiers_table(arms)),
        caveats=caveats,
    )


@OF_POINTS.register("tiers")
def tiers_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return hits and times by arm at every point: one table and one figure per axis of the sweep."""
    return findings_by_axis("tiers", points, points_table, draw_tiers, {})


def break_even(study: Study) -> dict[str, int | None]:
    """Return the least number of tokens that load faster from an idle tier than they compute, by tier; None: no number.

    Blocks are loaded where an arm has a pool, else one state, which replaces all tokens before it.
    """
    arms = [study.arms[name] for name in study.chosen()]
    pools = [arm for arm in arms if arm.pool is not None]
    arm = pools[0] if pools else next(arm for arm in arms if tiers_of(study, arm))
    policy = build.build_policy(study, arm, 0, 1)
    steps = build_prefill_time(study, policy, study.batch)
    if isinstance(policy, TreePolicy):
        size, state = policy.store.tree.block_size, policy.store.state_bytes
        ready = {name: partial(_state_ready_ns, rules, state, steps) for name, rules in study.store.tiers.items()}
    else:
        assert isinstance(policy, BlockPolicy), "other policies are refused where there are tiers"
        size, layers = policy.blocks.size, study.model.num_layers
        ready = {name: partial(_ready_ns, rules, policy, steps, layers) for name, rules in study.store.tiers.items()}
    return {name: break_even_tokens(ready_ns, steps, size) for name, ready_ns in ready.items()}


def _state_ready_ns(rules: TierRules, state_bytes: int, steps: PrefillTime, tokens: int) -> int:
    """Return nanoseconds until the token after a prefix is computed, with the state of the prefix loaded."""
    return Link(rules.bytes_per_s, rules.latency_s).delay(state_bytes) + sum(steps(tokens, tokens + 1))


def _ready_ns(rules: TierRules, policy: BlockPolicy, steps: PrefillTime, layers: int, tokens: int) -> int:
    """Return nanoseconds until the token after a prefix is computed, with the prefix loaded over an idle link."""
    blocks = tokens // policy.blocks.size + (policy.blocks.state_groups if policy.rules.needs_states else 0)
    load_ns = Link(rules.bytes_per_s, rules.latency_s).delay(blocks * policy.store.block_bytes)
    (step_ns,) = steps(tokens, tokens + 1)
    return overlapped(load_ns, step_ns, layers) if rules.load == "layerwise" else load_ns + step_ns


def _arm(finished: Finished, result: ArmResult) -> dict[str, Any]:
    """Return the loads of one arm over its counted requests of all seeds, and its tiers' traffic, mean over runs."""
    summary = result.data.summary
    prompt = summary["tokens"]["prompt"]
    loads = _loads(finished, result.data.name)
    return {
        "token_hit_rate": summary["token_hit_rate"],
        "ttft_mean_s": summary["ttft_s"]["mean"],
        "loaded_share": loads["loaded_tokens"] / prompt,
        "declined_share": loads["declined_tokens"] / prompt,
        "critical_load_s": loads["critical_load_s"] / summary["requests"],
        "tiers": _means([run["tiers"] for run in result.data.runs if "tiers" in run]),
    }


def _loads(finished: Finished, arm: str) -> dict[str, float]:
    """Return sums over the arm's counted requests at the study's own load; zeros for an arm without tiers."""
    study, names = finished.study, ("loaded_tokens", "declined_tokens", "critical_load_s")
    if not tiers_of(study, study.arms[arm]):
        return dict.fromkeys(names, 0.0)
    cells = {Cell(seed, study.arrivals.rate_rps) for seed in study.seeds}
    runs = [columns for cell, columns in finished.files[arm].columns().items() if cell in cells]
    return {name: float(sum(run[name][run["counted"].astype(bool)].sum() for run in runs)) for name in names}


def _means(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of each tier, as means over runs."""
    return [
        {"name": rows[0]["name"]}
        | {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key != "name"}
        for rows in zip(*runs, strict=True)
    ]


def _caveats(study: Study) -> tuple[str, ...]:
    quantised = [f"{name} ({rules.quantise_to})" for name, rules in study.store.tiers.items() if rules.quantise_to]
    if not quantised:
        return ()
    return (
        f"KV from {', '.join(quantised)} is read in its quantised form: answers change, and the effect is unknown in "
        "the simulator",
    )
