"""The analysis `bars`: measured numbers beside the bars that they must clear, with a verdict for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from spanlab import build
from spanlab.analysis.bars import Verdict, expected_prefix
from spanlab.build import GIB
from spanlab.build.tiers import build_prefill_time
from spanlab.report.analyses.bars import bars_table
from spanlab.report.sweep.data import SweepPoint, value_text
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.settings.bars import BARS, whole_prompt_arms
from spanlab.stats import t_interval
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import ArmResult
from spanlab.study.output.arm_files import Cell

SHARE_OF_PREDICTED, SHARE_OF_INFINITE, MOST_EVICTED, MOST_THRASHED, LEAST_LEAD = 0.85, 0.95, 0.10, 0.05, 0.20
TENFOLD, CLEARLY_TENFOLD = 10.0, 12.0  # a speedup, and the prediction from which on it is asked for
ROOMY = 1.2  # capacity ÷ working set


@ANALYSES.register("bars")
def bars_of_study(finished: Finished) -> Findings:
    """Every bar of every arm that it names; an arm that failed has none."""
    found = [
        verdict
        for name, arms in finished.study.bars.items()
        for arm in arms
        if arm in finished.files
        for verdict in BARS[name](finished, arm)
    ]
    plain = [verdict.plain() for verdict in found]
    return Findings({"bars": plain}, tables=(bars_table([(finished.study.workload.kind, plain)]),))


@OF_POINTS.register("bars")
def bars_of_points(points: Sequence[SweepPoint]) -> Findings:
    """The verdicts of all points."""
    told = [(value_text(point.value), point.summary["bars"]) for point in points if point.summary is not None]
    return Findings({"bars": [{"point": name, "verdicts": own} for name, own in told]}, tables=(bars_table(told),))


@BARS.register("prefill_speedup")
def prefill_speedup(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Speedup of requests with a known beginning ÷ that of the timing model for the same tokens, by order of parts.

    Predicted: computing all of the prompt ÷ computing what no earlier prompt began with, one request at a time.
    """
    cells = [Cell(seed, finished.study.arrivals.rate_rps) for seed in finished.study.seeds]
    own, base = (_joined(finished, name, cells) for name in (arm, finished.study.baseline))
    orders = np.array(finished.workload.labels.get("order", ("",) * len(finished.workload.requests)))
    for order in dict.fromkeys(orders[own["request_id"]].tolist()):
        rows = (own["seen_tokens"] > 0) & (orders[own["request_id"]] == order)
        if not rows.any():
            continue
        measured = float(sums.delays(base)["ttft_s"][rows].sum() / sums.delays(own)["ttft_s"][rows].sum())
        predicted = _predicted(finished, arm, sums.select(own, rows))
        name = f" of {order} order" if order else ""
        yield Verdict("prefill_speedup", arm, f"speedup{name}, ×", measured, least=SHARE_OF_PREDICTED * predicted)
        yield Verdict("prefill_speedup", arm, f"predicted speedup{name}, ×", predicted)
        if predicted >= CLEARLY_TENFOLD:
            yield Verdict("prefill_speedup", arm, f"speedup{name} where 12 × are predicted, ×", measured, least=TENFOLD)


def _joined(finished: Finished, arm: str, cells: Sequence[Cell]) -> sums.Columns:
    """Records of the cells, each cell's by request, so that arms are paired."""
    found = finished.files[arm].columns()
    ordered = [sums.select(found[cell], np.argsort(found[cell]["request_id"])) for cell in cells]
    return {name: np.concatenate([one[name] for one in ordered]) for name in ordered[0]}


def _predicted(finished: Finished, arm: str, columns: sums.Columns) -> float:
    study = finished.study
    longest = int(columns["prompt_tokens"].max())
    policy = build.build_policy(study, study.arms[arm], 0, longest + 1)
    steps = build_prefill_time(study, policy, study.batch)
    prompts = columns["prompt_tokens"].tolist()
    known = np.minimum(columns["seen_tokens"], columns["prompt_tokens"] - 1).tolist()
    whole = sum(sum(steps(0, prompt)) for prompt in prompts)
    return whole / sum(sum(steps(seen, prompt)) for seen, prompt in zip(known, prompts, strict=True))


@BARS.register("expected_prefix")
def expected_prefix_bar(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Reused tokens of prompts with shuffled documents beside E[LCP] with the orders before; of one order, all."""
    options = finished.study.workload.repeated_documents
    assert options is not None, "check_bars lets no other workload pass"
    columns = _joined(finished, arm, [Cell(seed, finished.study.arrivals.rate_rps) for seed in finished.study.seeds])
    labels = {name: np.array(values)[columns["request_id"]] for name, values in finished.workload.labels.items()}
    whole = options.documents * options.document_tokens
    counts = range(1, options.repeats + 1)
    expected = {
        "same": float(whole),
        "shuffled": float(np.mean([expected_prefix(options.documents, options.document_tokens, n) for n in counts])),
    }
    for order in options.orders:
        rows = labels["order"] == order
        reused = t_interval(_by_group(columns, rows) - options.system_tokens)
        slack = 0.0 if reused.high is None else reused.high - reused.mean
        named = f"reused documents of {order} order, tokens per prompt"
        least = SHARE_OF_INFINITE * whole if order == "same" else None
        yield Verdict("expected_prefix", arm, named, reused.mean, least, expected[order] + slack)
        yield Verdict("expected_prefix", arm, f"E[LCP] of {order} order, tokens", expected[order])


def _by_group(columns: sums.Columns, rows: np.ndarray) -> np.ndarray:
    """Mean reused tokens of the chosen requests by group."""
    groups, numbers = np.unique(columns["group_id"][rows], return_inverse=True)
    means: np.ndarray = np.bincount(numbers, columns["reused_tokens"][rows], len(groups)) / np.bincount(numbers)
    return means


@BARS.register("computed_once")
def computed_once(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Tokens that requests compute once the first prefill is done, which are those that no prompt before has.

    A block more for each request is allowed. How many requests compute again what all share is told.
    """
    block = finished.study.arms[arm].block_size
    runs = [_once(columns, block) for columns in finished.files[arm].columns().values()]
    late, computed, new, again, factor = np.array(runs).sum(axis=0).tolist()
    if late:
        said = "tokens computed after the first prefill"
        yield Verdict("computed_once", arm, said, computed, least=new, most=new + late * (block - 1))
    yield Verdict("computed_once", arm, "requests that compute the shared part again", again / len(runs))
    yield Verdict("computed_once", arm, "prompt tokens ÷ computed tokens", factor / len(runs))


def _once(columns: sums.Columns, block: int) -> tuple[float, ...]:
    """Of one run: late requests, tokens that they compute and should; duplicates of any time; prompts ÷ computed."""
    prompt, computed, seen = (columns[f"{name}_tokens"] for name in ("prompt", "computed", "seen"))
    late = columns["admitted_s"] >= columns["first_token_s"].min()
    new = prompt - np.minimum(seen, prompt - 1)
    again = int((columns["reused_tokens"] + block <= seen.max()).sum()) - 1  # the first request computes it once
    return int(late.sum()), int(computed[late].sum()), int(new[late].sum()), again, prompt.sum() / computed.sum()


@BARS.register("near_infinite")
def near_infinite(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Token hit rate beside that of a cache without limit, judged where the memory holds the working set."""
    result = next(one for one in finished.results if one.data.name == arm)
    summary, capacity = result.data.summary, finished.study.store.total_gib
    infinite = summary["bounds"]["infinite_prefix_tokens"] / summary["tokens"]["prompt"]
    sets = np.inf if capacity is None else capacity * GIB / _working_set(finished, result)
    yield Verdict("near_infinite", arm, "memory ÷ working set", sets)
    least = SHARE_OF_INFINITE * infinite if sets >= 1 else None
    yield Verdict("near_infinite", arm, "token hit rate", summary["token_hit_rate"], least=least)
    yield Verdict("near_infinite", arm, "token hit rate of a cache without limit", infinite)
    inserted, evicted = (sum(run[f"{name}_bytes"] for run in result.data.runs) for name in ("inserted", "evicted"))
    most = MOST_EVICTED if sets >= ROOMY else None
    yield Verdict("near_infinite", arm, "evicted ÷ inserted bytes", evicted / inserted if inserted else 0.0, most=most)
    yield Verdict("near_infinite", arm, "prompt tokens ÷ computed tokens", 1 / (1 - summary["token_hit_rate"]))


@BARS.register("thrash")
def thrash(finished: Finished, arm: str) -> Iterator[Verdict]:
    """KV that is computed again because it was evicted ÷ evicted bytes, judged where there is room to spare.

    However long ago it was evicted, so that no less is counted than what comes back within so many requests.
    """
    result = next(one for one in finished.results if one.data.name == arm)
    capacity, evicted = finished.study.store.total_gib, sum(run["evicted_bytes"] for run in result.data.runs)
    again = sum(int(one["lost_kv_evicted"].sum()) for one in finished.files[arm].columns().values())
    share = again * build.held_token_bytes(finished.study) / evicted if evicted else 0.0
    roomy = capacity is None or capacity * GIB >= ROOMY * _working_set(finished, result)
    yield Verdict("thrash", arm, "computed again ÷ evicted bytes", share, most=MOST_THRASHED if roomy else None)


@BARS.register("beyond_whole_prompts")
def beyond_whole_prompts(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Token hit rate beyond that of the arm which finds whole prompts alone, paired by seed: the interval's low end."""
    (whole,) = whole_prompt_arms(finished.study)
    leads = _hit_rates(finished, arm) - _hit_rates(finished, whole)
    found = t_interval(leads)
    low = found.mean if found.low is None else found.low
    yield Verdict("beyond_whole_prompts", arm, f"token hit rate − that of {whole}", found.mean)
    yield Verdict("beyond_whole_prompts", arm, "the same, low end of its 95 % interval", low, least=LEAST_LEAD)


def _hit_rates(finished: Finished, arm: str) -> np.ndarray:
    """Reused ÷ prompt tokens of each run."""
    every = finished.files[arm].columns()
    return np.array([every[cell]["reused_tokens"].sum() / every[cell]["prompt_tokens"].sum() for cell in every])


def _working_set(finished: Finished, result: ArmResult) -> float:
    """Bytes of KV of everything that differs in one run: prompts without what was seen before, and outputs."""
    every = finished.files[result.data.name].columns().values()
    new = [one["prompt_tokens"] - one["seen_tokens"] + one["output_tokens"] for one in every]
    return float(np.mean([tokens.sum() for tokens in new])) * build.held_token_bytes(finished.study)
