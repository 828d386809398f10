"""Virtual against wall clock: the same studies on the engine, and whether both clocks measure the same delays.

    .venvs/engine/bin/python benchmarks/clock/measure.py [ROUNDS]

Each round (of 5) serves a study's arrivals three times, in an order that is drawn: on the wall clock, on the virtual
clock, and on the virtual clock again, which shows how far two equal runs are apart (A/A). Writes `results.json` and
`README.md` beside this file: per arm the paired ratios of mean TTFT and mean E2E, and seconds that each clock took.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import facts, write_results
from pages import table

import spanlab
from spanlab.stats import paired_ratio_interval

CLOCKS = {"wall": "wall", "virtual": "virtual", "again": "virtual"}
DELAYS = ("ttft", "e2e")
STUDIES = ("quality_fidelity", "pic_fidelity")
GIVEN = ("load.shares=[]", "repeats=1", "seeds=[0]", "analyses=[summary]", "output.figures=false", "tracking=none")
AT_ONCE_RPS = 1000.0
SHARE = 0.3  # of the rate that saturates the baseline: queues form, and the wall clock has idle time to wait for


def records_of(entry: str, rate_rps: float, clock: str, *more: str) -> pl.DataFrame:
    """The finished requests of one run."""
    given = (f"arrivals.rate_rps={rate_rps:.3g}", f"engine.clock={clock}", "engine.threads=1", *GIVEN, *more)
    with tempfile.TemporaryDirectory() as folder:
        return spanlab.run(entry, *given, f"output.root={folder}").records


def saturating_rate(entry: str) -> float:
    """Requests per second that the baseline serves when all are there from the start."""
    records = records_of(entry, AT_ONCE_RPS, "virtual", "only=[none]")
    return len(records) / float(records["finished_s"].max() - records["arrived_s"].min())


def served(entry: str, rate_rps: float, clock: str) -> dict[str, Any]:
    """One run of a study: mean delays by arm, in seconds, and how long the run took."""
    began = time.perf_counter()
    records = records_of(entry, rate_rps, clock)
    means = records.group_by("arm", maintain_order=True).agg(
        ttft=(pl.col("first_token_s") - pl.col("arrived_s")).mean(),
        e2e=(pl.col("finished_s") - pl.col("arrived_s")).mean(),
    )
    return {"took_s": time.perf_counter() - began, "arms": {row.pop("arm"): row for row in means.to_dicts()}}


def measured(entry: str, rounds: int, rng: np.random.Generator) -> dict[str, Any]:
    """All rounds of a study, and the ratios of its clocks."""
    rate = SHARE * saturating_rate(entry)
    runs: dict[str, list[dict[str, Any]]] = {clock: [] for clock in CLOCKS}
    for number in range(rounds):
        for clock in rng.permutation(list(CLOCKS)).tolist():
            runs[clock].append(served(entry, rate, CLOCKS[clock]))
            print(f"{entry} round {number + 1} {clock}: {runs[clock][-1]['took_s']:.1f} s", flush=True)
    arms = [compared(arm, runs, delay) for arm in runs["wall"][0]["arms"] for delay in DELAYS]
    took = {clock: [run["took_s"] for run in found] for clock, found in runs.items()}
    return {"study": entry, "rate_rps": rate, "arms": arms, "took_s": took}


def compared(arm: str, runs: dict[str, list[dict[str, Any]]], delay: str) -> dict[str, Any]:
    """An arm's mean delay on the wall clock ÷ that on the virtual clock, over rounds, beside that of equal runs."""
    wall, virtual, again = ([run["arms"][arm][delay] for run in runs[clock]] for clock in CLOCKS)
    ratio, equal = paired_ratio_interval(wall, virtual), paired_ratio_interval(again, virtual)
    return {
        "arm": arm,
        "delay": delay,
        "virtual_s": virtual,
        "wall_s": wall,
        "again_s": again,
        "wall_by_virtual": [ratio.mean, ratio.low, ratio.high],
        "again_by_virtual": [equal.mean, equal.low, equal.high],
        "agrees": agrees(ratio, equal),
    }


def agrees(ratio: Any, equal: Any) -> bool:
    """Whether no difference of the clocks is shown, or one no larger than what equal runs may differ by."""
    spread = max(abs(equal.low - 1), abs(equal.high - 1))
    return ratio.low <= 1 <= ratio.high or abs(ratio.mean - 1) <= spread


def percent(interval: list[float]) -> str:
    """A ratio with its interval as differences in percent."""
    mean, low, high = (f"{100 * (value - 1):+.1f}" for value in interval)
    return f"{mean} [{low}, {high}] %"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """An arm's row of the table."""
    delay = f"{1e3 * float(np.mean(row['virtual_s'])):.1f} ms"
    ratios = percent(row["wall_by_virtual"]), percent(row["again_by_virtual"])
    return f"`{row['arm']}`", row["delay"].upper(), delay, *ratios, "yes" if row["agrees"] else "no"


def page(results: list[dict[str, Any]], known: dict[str, Any], rounds: int) -> str:
    """The page beside the results."""
    lines = ["# Virtual against wall clock", "", *STORY, ""]
    for one in results:
        wall, virtual = (float(np.median(one["took_s"][clock])) for clock in ("wall", "virtual"))
        within = sum(row["agrees"] for row in one["arms"])
        lines += [
            f"## `{one['study']}`",
            "",
            f"{one['rate_rps']:.2f} requests/s. {within} of {len(one['arms'])} means agree. Medians of whole runs are "
            f"{virtual:.1f} s on the virtual clock and {wall:.1f} s on the wall clock: {wall / virtual:.1f} × faster.",
            "",
            table(HEAD, map(cells, one["arms"])),
        ]
    return "\n".join([*lines, f"{rounds} rounds on {known['machine']}, 1 thread, commit {known['commit']}.", ""])


HEAD = ("arm", "mean of", "virtual clock", "wall ÷ virtual − 1", "equal runs (A/A)", "agrees")
STORY = (
    "This page compares the delays that the engine measures on its two clocks. The engine serves the requests of the",
    "fidelity studies on both. The rate is three tenths of the one that saturates the baseline. On the virtual clock,",
    "a step lasts as long as it was measured, and idle time is skipped. On the wall clock, requests arrive in real",
    "time. `measure.py` describes the method.",
    "",
    "Intervals are 95 % over rounds, paired. A mean agrees if its interval contains zero. It also agrees if it is no",
    "further from zero than the interval of equal runs, both on the virtual clock (A/A).",
)


def main() -> None:
    """Measure both studies."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    if rounds < 2:
        sys.exit(f"ROUNDS={rounds}: expected 2 or more, for an interval")
    rng = np.random.default_rng(0)
    results = [measured(entry, rounds, rng) for entry in STUDIES]
    known = facts()
    write_results(HERE / "results.json", known | {"rounds": rounds, "studies": results})
    (HERE / "README.md").write_text(page(results, known, rounds))
    print(page(results, known, rounds))


if __name__ == "__main__":
    main()
