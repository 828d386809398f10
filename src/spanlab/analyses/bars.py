"""The table of the analysis `bars`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spanlab.analyses.base import Findings, Finished
from spanlab.build import build_policy, build_prefill_time
from spanlab.model_spec import GIB
from spanlab.records import delays_of
from spanlab.registry import Registry, one_of
from spanlab.report.sweep import SweepPoint, value_text
from spanlab.report.table import Field, Table, hidden, number_format, tabulate, word
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis, BarSettings
from spanlab.settings.arms import check_names
from spanlab.settings.server import held_token_bytes
from spanlab.settings.study import Study
from spanlab.stats import Verdict, expected_prefix, t_interval, verdict_of
from spanlab.study.bounds import ArmResult
from spanlab.study.numbers import Columns, RunCell, select
from spanlab.workloads.synthetic import RepeatedDocumentsWorkload

_FIELDS = (
    Field("point", "point", word, left=True),
    Field("arm", "arm", word, "verdict.arm", left=True),
    Field("what", "number", word, "verdict.what", left=True),
    Field("value", "measured", number_format(".4g"), "verdict.value"),
    Field("bar", "bar", word, "verdict.limits"),
    Field(
        "verdict",
        "verdict",
        lambda verdict: word(("clears" if verdict.holds else "misses") if verdict.judged else ""),
        left=True,
    ),
    Field("name", "", hidden, "verdict.bar", left=True),
)


def bars_table(points: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Table:
    """Return a row per number of every point; the title counts the bars that are cleared."""
    rows: list[dict[str, Any]] = [
        {"point": point, "verdict": verdict_of(entry)}
        for point, entries in points
        for entry in entries
    ]
    decided = [row["verdict"] for row in rows if row["verdict"].judged]
    title = f"Bars: {sum(verdict.holds for verdict in decided)} of {len(decided)} are cleared"
    return tabulate(
        "bars",
        title,
        _FIELDS,
        rows,
        ("each bar is judged alone, without a correction for their number",),
    )


# ------------------------------------------------------------------------------
# The analysis `bars`: measured numbers compared with their bars, and a verdict for each.
# ------------------------------------------------------------------------------

#: Functions of a finished study and the name of an arm that yield verdicts.
BARS: Registry[Iterable[Verdict]] = Registry("bars", given=("finished", "arm"))
_REORDERED = "repeated_documents"  # the workload whose orders are known
SHARE_OF_PREDICTED = 0.85
SHARE_OF_INFINITE = 0.95
MOST_EVICTED = 0.10
MOST_THRASHED = 0.05
LEAST_LEAD = 0.20
# the required speedup, and the predicted speedup from which it is required
TENFOLD, CLEARLY_TENFOLD = 10.0, 12.0
ROOMY = 1.2  # capacity ÷ working set


def bars_of_study(finished: Finished) -> Findings:
    """Return the verdicts of all bars over the arms that they name; failed arms have none."""
    verdicts = [
        verdict
        for name, arms in finished.study.analyses.bars.arms.items()
        for arm in arms
        if arm in finished.files
        for verdict in BARS[name](finished, arm)
    ]
    plain = [verdict.plain() for verdict in verdicts]
    return Findings({"bars": plain}, tables=(bars_table([(finished.study.workload.kind, plain)]),))


def bars_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the verdicts of all points of a sweep."""
    verdicts_by_point = [
        (value_text(point.value), (point.summary or {})["bars"]) for point in points
    ]
    return Findings(
        {"bars": [{"point": name, "verdicts": verdicts} for name, verdicts in verdicts_by_point]},
        tables=(bars_table(verdicts_by_point),),
    )


@BARS.register("prefill_speedup")
def prefill_speedup(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Compare the speedup of requests with a known prefix with the timing model's prediction, by
    order of parts.

    Predicted: time to compute the whole prompt ÷ time to compute the tokens after the known prefix,
    one request at a time.
    """
    study = finished.study
    cells = [RunCell(seed, study.arrivals.rate_rps) for seed in study.runs.seeds]
    arm_columns, base_columns = (
        _joined(finished, name, cells) for name in (arm, study.runs.baseline)
    )
    orders = np.array(
        finished.workload.labels.get("order", ("",) * len(finished.workload.requests))
    )
    for order in dict.fromkeys(orders[arm_columns["request_id"]].tolist()):
        rows = (_known_tokens(arm_columns) > 0) & (orders[arm_columns["request_id"]] == order)
        if not rows.any():
            continue
        measured = float(
            delays_of(base_columns)["ttft_s"][rows].sum()
            / delays_of(arm_columns)["ttft_s"][rows].sum()
        )
        columns = select(arm_columns, rows)
        policy = build_policy(study, study.arms[arm], 0, int(columns["prompt_tokens"].max()) + 1)
        steps = build_prefill_time(study, policy, study.batch)
        prompts = columns["prompt_tokens"].tolist()
        prefixes = np.minimum(_known_tokens(columns), columns["prompt_tokens"] - 1).tolist()
        predicted = sum(sum(steps(0, prompt)) for prompt in prompts) / sum(
            sum(steps(known_tokens, prompt))
            for known_tokens, prompt in zip(prefixes, prompts, strict=True)
        )
        name = f" of {order} order" if order else ""
        yield Verdict(
            "prefill_speedup",
            arm,
            f"speedup{name}, ×",
            measured,
            least=SHARE_OF_PREDICTED * predicted,
        )
        yield Verdict("prefill_speedup", arm, f"predicted speedup{name}, ×", predicted)
        if predicted >= CLEARLY_TENFOLD:
            yield Verdict(
                "prefill_speedup",
                arm,
                f"speedup{name} where 12 × are predicted, ×",
                measured,
                least=TENFOLD,
            )


def _joined(finished: Finished, arm: str, cells: Sequence[RunCell]) -> Columns:
    """Return the records of the cells, ordered by request in each cell, so that arms are paired."""
    by_cell = finished.files[arm].columns()
    ordered = [select(by_cell[cell], np.argsort(by_cell[cell]["request_id"])) for cell in cells]
    return {name: np.concatenate([columns[name] for columns in ordered]) for name in ordered[0]}


def _known_tokens(columns: Columns) -> np.ndarray:
    """Return the tokens of each prompt that had been computed before its admission."""
    known: np.ndarray = (
        columns["prompt_tokens"] - columns["lost_never_seen"] - columns["lost_out_of_reach"]
    )
    return known


@BARS.register("expected_prefix")
def expected_prefix_bar(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Compare reused tokens of shuffled prompts with E[LCP] over earlier orders, of unshuffled ones
    with all tokens."""
    settings = finished.study.workload
    assert isinstance(settings, RepeatedDocumentsWorkload), "check_bars lets no other workload pass"
    options = settings.repeated_documents
    columns = _joined(
        finished,
        arm,
        [RunCell(seed, finished.study.arrivals.rate_rps) for seed in finished.study.runs.seeds],
    )
    labels = {
        name: np.array(values)[columns["request_id"]]
        for name, values in finished.workload.labels.items()
    }
    all_tokens = options.documents * options.document_tokens
    counts = range(1, options.repeats + 1)
    expected = {
        "same": float(all_tokens),
        "shuffled": float(
            np.mean(
                [expected_prefix(options.documents, options.document_tokens, n) for n in counts]
            )
        ),
    }
    for order in options.orders:
        rows = labels["order"] == order
        # the mean reused tokens of the selected requests by group
        groups, numbers = np.unique(columns["group_id"][rows], return_inverse=True)
        means: np.ndarray = np.bincount(
            numbers, columns["reused_tokens"][rows], len(groups)
        ) / np.bincount(numbers)
        reused = t_interval(means - options.system_tokens)
        slack = 0.0 if reused.high is None else reused.high - reused.mean
        description = f"reused documents of {order} order, tokens per prompt"
        least = SHARE_OF_INFINITE * all_tokens if order == "same" else None
        yield Verdict(
            "expected_prefix", arm, description, reused.mean, least, expected[order] + slack
        )
        yield Verdict("expected_prefix", arm, f"E[LCP] of {order} order, tokens", expected[order])


@BARS.register("computed_once")
def computed_once(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Compare tokens computed after the first prefill with the tokens that no earlier prompt has.

    Each request may compute less than one block more. The number of requests that compute the
    shared part again is reported.
    """
    block = finished.study.arms[arm].block_size
    runs = []
    for columns in finished.files[arm].columns().values():
        prompts, computes, seen = (
            columns[f"{name}_tokens"] for name in ("prompt", "computed", "seen")
        )
        is_late = columns["admitted_s"] >= columns["first_token_s"].min()
        unseen = prompts - np.minimum(seen, prompts - 1)
        again = columns["reused_tokens"] + block <= seen.max()
        runs.append(
            (
                int(is_late.sum()),
                int(computes[is_late].sum()),
                int(unseen[is_late].sum()),
                int(again.sum()) - 1,  # the first request has to compute the shared part
                prompts.sum() / computes.sum(),
            )
        )
    late, computed, new, recomputing, factor = np.array(runs).sum(axis=0).tolist()
    if late:
        description = "tokens computed after the first prefill"
        yield Verdict(
            "computed_once", arm, description, computed, least=new, most=new + late * (block - 1)
        )
    yield Verdict(
        "computed_once", arm, "requests that compute the shared part again", recomputing / len(runs)
    )
    yield Verdict("computed_once", arm, "prompt tokens ÷ computed tokens", factor / len(runs))


@BARS.register("near_infinite")
def near_infinite(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Compare the token hit rate with that of an infinite cache; judged if memory holds the working
    set."""
    result = _result_of(finished, arm)
    summary, capacity = result.data.summary, finished.study.store.total_gib
    infinite = summary["bounds"]["infinite_prefix_tokens"] / summary["tokens"]["prompt"]
    sets = np.inf if capacity is None else capacity * GIB / _working_set(finished, result)
    yield Verdict("near_infinite", arm, "memory ÷ working set", sets)
    least = SHARE_OF_INFINITE * infinite if sets >= 1 else None
    yield Verdict("near_infinite", arm, "token hit rate", summary["token_hit_rate"], least=least)
    yield Verdict("near_infinite", arm, "token hit rate of a cache without limit", infinite)
    inserted, evicted = (
        sum(run[f"{name}_bytes"] for run in result.data.runs) for name in ("inserted", "evicted")
    )
    most = MOST_EVICTED if sets >= ROOMY else None
    yield Verdict(
        "near_infinite",
        arm,
        "evicted ÷ inserted bytes",
        evicted / inserted if inserted else 0.0,
        most=most,
    )
    yield Verdict(
        "near_infinite", arm, "prompt tokens ÷ computed tokens", 1 / (1 - summary["token_hit_rate"])
    )


@BARS.register("thrash")
def thrash(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Compare KV that was recomputed after eviction with evicted bytes; judged where memory exceeds
    the working set.

    All recomputed KV counts, however long ago it was evicted; a limit on that distance could only
    lower it.
    """
    result = _result_of(finished, arm)
    study, evicted = finished.study, sum(run["evicted_bytes"] for run in result.data.runs)
    recomputed_tokens = sum(
        int(columns["lost_kv_evicted"].sum()) for columns in finished.files[arm].columns().values()
    )
    share = (
        recomputed_tokens * held_token_bytes(study.model, study.batch) / evicted if evicted else 0.0
    )
    capacity = study.store.total_gib
    roomy = capacity is None or capacity * GIB >= ROOMY * _working_set(finished, result)
    yield Verdict(
        "thrash",
        arm,
        "computed again ÷ evicted bytes",
        share,
        most=MOST_THRASHED if roomy else None,
    )


@BARS.register("beyond_whole_prompts")
def beyond_whole_prompts(finished: Finished, arm: str) -> Iterator[Verdict]:
    """Compare the lead in token hit rate over the arm that matches whole prompts only, paired by
    seed."""
    (whole_prompts,) = whole_prompt_arms(finished.study)
    leads = _hit_rates(finished, arm) - _hit_rates(finished, whole_prompts)
    lead = t_interval(leads)
    low = lead.mean if lead.low is None else lead.low
    yield Verdict(
        "beyond_whole_prompts", arm, f"token hit rate − that of {whole_prompts}", lead.mean
    )
    yield Verdict(
        "beyond_whole_prompts", arm, "the same, low end of its 95 % interval", low, least=LEAST_LEAD
    )


def _result_of(finished: Finished, arm: str) -> ArmResult:
    return next(result for result in finished.results if result.data.name == arm)


def _hit_rates(finished: Finished, arm: str) -> np.ndarray:
    """Return reused ÷ prompt tokens of each run."""
    by_cell = finished.files[arm].columns()
    return np.array(
        [
            by_cell[cell]["reused_tokens"].sum() / by_cell[cell]["prompt_tokens"].sum()
            for cell in by_cell
        ]
    )


def _working_set(finished: Finished, result: ArmResult) -> float:
    """Return KV bytes of the distinct tokens of one run: outputs, and prompts without their known
    prefixes."""
    study, runs = finished.study, finished.files[result.data.name].columns().values()
    new = [
        columns["prompt_tokens"] - columns["seen_tokens"] + columns["output_tokens"]
        for columns in runs
    ]
    return float(np.mean([tokens.sum() for tokens in new])) * held_token_bytes(
        study.model, study.batch
    )


def _check(study: Study) -> None:
    """Raise ValueError for unknown bars and arms, and for workloads that a bar does not support."""
    for name, arms in study.analyses.bars.arms.items():
        one_of("bars", name, BARS)
        check_names(f"bars.{name}", arms, study.arms, is_read=True)
    if not study.analyses.bars.arms:
        raise ValueError(
            "bars={} with analyses=bars: expected arms of a bar, as in bars.near_infinite=[radix]"
        )
    if "expected_prefix" in study.analyses.bars.arms and study.workload.kind != _REORDERED:
        raise ValueError(
            f"bars.expected_prefix with workload.kind={study.workload.kind}: expected {_REORDERED}"
        )
    if "prefill_speedup" in study.analyses.bars.arms:
        if study.arrivals.clients != 1:
            clients = f"arrivals.clients={study.arrivals.clients}"
            raise ValueError(
                f"bars.prefill_speedup with {clients}: expected arrivals=closed_loop with 1"
            )
        if study.runs.baseline not in study.chosen():
            raise ValueError(
                f"bars.prefill_speedup with baseline={study.runs.baseline}: expected one of the arms that run"
            )
    if "thrash" in study.analyses.bars.arms and study.model.is_hybrid:
        raise ValueError(
            f"bars.thrash with model.name={study.model.name}: expected attention layers alone, for it counts KV"
        )
    if (
        "beyond_whole_prompts" in study.analyses.bars.arms
        and len(arms := whole_prompt_arms(study)) != 1
    ):
        names = ", ".join(arms) or "none"
        raise ValueError(
            f"bars.beyond_whole_prompts with {names} of policy=exact_hash: expected one such arm that runs"
        )


def _check_unread(study: Study) -> None:
    """Raise ValueError for unknown bars and arms, where nothing reads them."""
    for name, arms in study.analyses.bars.arms.items():
        one_of("bars", name, BARS)
        check_names(f"bars.{name}", arms, study.arms, is_read=False)


def whole_prompt_arms(study: Study) -> list[str]:
    """Return the arms that run and match whole prompts only."""
    return [name for name in study.chosen() if study.arms[name].policy_name == "exact_hash"]


ANALYSES.add(
    Analysis(
        "bars",
        bars_of_study,
        needs=(ARMS,),
        options=BarSettings,
        check=_check,
        check_unread=_check_unread,
        of_points=bars_of_points,
    )
)
