"""Inputs of `analysis.prefill`: records and step logs of one client's requests, served one after another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.outputs import read_outputs
from spanlab.analysis.prefill import PARTS, PHASES, ArmPrefills, Floats
from spanlab.device_rates import DeviceRates
from spanlab.settings import Study
from spanlab.study.execution.cells import cells
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import family
from spanlab.study.output.arm_files import ArmFiles, Cell
from spanlab.study.output.step_log import LoggedStep, read_steps
from spanlab_sim.bound import Bound

Logits = Mapping[tuple[int, int], NDArray[np.float32]]


def read_logits(study: Study, arm: str, files: ArmFiles) -> Logits:
    """Return logits of the first token by seed and request; empty where they were not recorded."""
    if study.engine.record not in ("first_logits", "logits"):
        return {}
    by_seed = {seed: read_outputs(files.outputs(arm, cell)).logits for seed, cell in _cells(study, arm).items()}
    return {(seed, request): rows[0] for seed, logits in by_seed.items() for request, rows in logits.items()}


def read_prefills(
    study: Study, arm: str, files: ArmFiles, rates: DeviceRates | None, reference: Logits | None = None
) -> ArmPrefills:
    """Return the counted requests of one arm at the study's own load.

    `rates`      rates of the engine's device; None for a simulation
    `reference`  logits of the baseline; None without logits
    """
    columns = sums.read_records(files.records)
    at_load = sums.at_rate(columns, study.arrivals.rate_rps) & np.isin(columns["seed"], study.seeds)
    columns = sums.select(columns, at_load & columns["counted"].astype(bool))
    phase_s: Mapping[str, Floats] = {}
    bound = None
    if rates is not None:
        phase_s, bound = _measured(study, columns, _logs(study, arm, files), Bound(study.model, rates))
    return ArmPrefills(
        arm=arm,
        family=family(study.arms[arm]),
        seed=columns["seed"],
        group=columns["group_id"],
        request=columns["request_id"],
        ttft_s=sums.delays(columns)["ttft_s"],
        prompt=columns["prompt_tokens"],
        reused=columns["reused_tokens"],
        computed=columns["computed_tokens"],
        repaired=columns["repaired_tokens"],
        captured_states=columns["captured_states"],
        captured_bytes=columns["captured_state_bytes"],
        parts=phase_s,
        bound_s=bound,
        logit_gap=_gaps(columns, read_logits(study, arm, files), reference) if reference else None,
    )


def _gaps(columns: sums.Columns, logits: Logits, reference: Logits) -> Floats:
    keys = zip(columns["seed"].tolist(), columns["request_id"].tolist(), strict=True)
    return np.array([np.abs(logits[key] - reference[key]).max() for key in keys], np.float64)


def _logs(study: Study, arm: str, files: ArmFiles) -> dict[int, list[LoggedStep]]:
    """Return the logged steps by seed."""
    return {seed: read_steps(files.log(arm, cell)) for seed, cell in _cells(study, arm).items()}


def _cells(study: Study, arm: str) -> dict[int, Cell]:
    """Return the cells at the study's own load, by seed."""
    return {cell.seed: cell for cell in cells(study, arm) if cell.rate_rps == study.arrivals.rate_rps}


def _measured(
    study: Study, columns: sums.Columns, logs: Mapping[int, list[LoggedStep]], bound: Bound
) -> tuple[dict[str, Floats], Floats]:
    """Return seconds by part, and lower bounds, of every request."""
    rows = []
    admitted, first = (np.rint(columns[name] * 1e9).astype(np.int64) for name in ("admitted_s", "first_token_s"))
    waited = columns["first_token_s"] - columns["arrived_s"]
    for seed, start, end, ttft in zip(columns["seed"].tolist(), admitted.tolist(), first.tolist(), waited, strict=True):
        steps = _between(logs[seed], start, end)
        parts = [sum(step.phases[phase] for step in steps) for phase in PHASES]
        rows.append((*parts, ttft - sum(parts), bound.seconds(step.features for step in steps)))
    table = np.array(rows, np.float64).reshape(-1, len(PARTS) + 1)
    return dict(zip(PARTS, table.T, strict=False)), table[:, -1]


def _between(steps: Sequence[LoggedStep], start: int, end: int) -> list[LoggedStep]:
    """Return the steps from a request's admission to its first token; times in nanoseconds."""
    first = bisect_left(steps, start, key=lambda step: step.started_ns)
    last = bisect_right(steps, end, key=lambda step: step.ended_ns)
    return list(steps[first:last])
