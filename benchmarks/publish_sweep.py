"""Publish the headline sweep: copy it to quality_sweep/, fill its page, the README and docs/results.md.

    bash runall.sh -cn quality_sweep
    bash runall.sh -cn quality_clean backend=sim 'sweep=["hardware.compute_efficiency=0.03,0.5"]' \\
        seeds=[0,1,2,3,4] output.run=timing_small
    bash runall.sh -cn quality_sweep 'sweep=["hardware.compute_efficiency=0.3,0.9"]' output.run=timing_large
    .venvs/sim/bin/python benchmarks/publish_sweep.py

No number is typed by hand, nor where a comparison holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from publish import HERE, RESULTS, ROOT, fill, table

from spanlab.report.faces import markdown
from spanlab.report.sweep_data import SweepPoint, Value, by_axis, sweep_rows, value_text
from spanlab.report.sweep_table import failures, rate_tables
from spanlab.study.sweep import FIGURES, read_points

STUDIES = ROOT / "outputs" / "quality"
STUDY, SMALL, LARGE = (STUDIES / name for name in ("quality_sweep", "timing_small", "timing_large"))
TARGET = HERE / "quality_sweep"
MARKS = {
    "store.total_gib": "by_budget",
    "workload.questions_per_document": "by_questions",
    "arrivals.order": "by_order",
}
BUDGET, QUESTIONS, ORDER = MARKS
LEARNED = ("dp_3", "dp_8", "dp_3_branch")
TAIL = ("tail_1", "tail_3")
EQUAL = 0.5  # points within which two rates are called equal

#: Token hit rate in percent, by setting, value and arm.
Rates = Mapping[str, Mapping[Value, Mapping[str, float]]]


def main() -> None:
    """Copy, then fill."""
    points = read_points(STUDY)
    summary = copy_sweep(STUDY, TARGET, "summary.json")
    shutil.copy(STUDY / "config.yaml", TARGET / "config.yaml")
    rates = rates_of(points)
    shared = {"caption": caption(summary), "claims": claims(rates)}
    when = {"timing": timing(SMALL, LARGE)}
    by_key = zip(by_axis(points), rate_tables(points), strict=True)
    tables = {MARKS[key]: markdown(table) for key, table in by_key}
    fill(TARGET / "README.md", shared | when | tables)
    fill(ROOT / "README.md", shared | {"table:quality_sweep": front_table(rates)})
    fill(RESULTS, when)
    for failure in failures(points):
        print(f"failed: {failure}")


def copy_sweep(source: Path, target: Path, summary: str) -> dict[str, Any]:
    """Bring a sweep's table, figures and summary to `target`; returns the summary, kept under that name."""
    target.mkdir(exist_ok=True)
    shutil.copy(source / "tables" / "sweep.csv", target / "sweep.csv")
    shutil.copy(source / "summary.json", target / summary)
    for name in FIGURES:
        shutil.copy(source / "figures" / f"{name}.png", target / f"{name}.png")
    kept: dict[str, Any] = json.loads((target / summary).read_text())
    return kept


def caption(summary: Mapping[str, Any]) -> str:
    """Command, workload, model and commit."""
    seeds = len(summary["seeds"])
    return (
        f"*`bash runall.sh -cn quality_sweep`: {summary['workload']['provenance']} of QuALITY, "
        f"{summary['model']} on {summary['hardware']}; 64 GiB, all questions, shuffled arrivals "
        f"where not varied; {seeds} seeds. Simulated: the cache is executed, step times come from "
        f"an uncalibrated roofline. Commit {summary['commit']}.*\n"
    )


def rates_of(points: Sequence[SweepPoint]) -> Rates:
    """The rows of a sweep as nested mappings."""
    rates: dict[str, dict[Value, dict[str, float]]] = {}
    for row in sweep_rows(points):
        arms = rates.setdefault(row.axis, {}).setdefault(row.value, {})
        arms[row.arm] = 100 * row.token_hit_rate
    return rates


def front_table(rates: Rates) -> str:
    """Every arm at every budget, number of questions, and with an article's questions in a row."""
    points = [(f"{value_text(value)} GiB", arms) for value, arms in rates[BUDGET].items()]
    points += [(f"{value_text(value)} questions", arms) for value, arms in rates[QUESTIONS].items()]
    points.append(("in a row", rates[ORDER]["as_given"]))
    rows = [(f"`{arm}`", *(f"{arms[arm]:.1f}" for _, arms in points)) for arm in points[0][1]]
    return table(("arm", *(name for name, _ in points)), rows)


def timing(small: Path, large: Path) -> str:
    """When token counts depend on step times: a small store and a large one under two rooflines."""
    tight, ample = (rates_of(read_points(folder)) for folder in (small, large))
    (low, slow), (high, fast) = next(iter(tight.values())).items()
    (less, first), (more, second) = next(iter(ample.values())).items()
    moved = {arm: abs(second[arm] - rate) for arm, rate in first.items()}
    most = max(moved, key=lambda arm: moved[arm])
    others = max(change for arm, change in moved.items() if arm != most)
    examples = ", ".join(
        f"`{arm}` {fast[arm]:.1f} and {slow[arm]:.1f} %" for arm in ("boundary", "branch", "dp_3", "last")
    )
    return (
        f"Token counts depend on step times through the order of events and the memory of running requests. "
        f"With 8 MiB (`quality_clean backend=sim`), {100 * high:g} and {100 * low:g} % of peak compute give "
        f"{examples}. With 64 GiB (`quality_sim`), {100 * less:g} and {100 * more:g} % of peak change `{most}` "
        f"by {moved[most]:.1f} points and every other arm by at most {others:.1f}.\n"
    )


def claims(rates: Rates) -> str:
    """What the sweep says, each sentence with its range."""
    said = (dense(rates), tail(rates), learned(rates), hashed(rates))
    return "".join(f"- {words}\n" for words in said)


def dense(rates: Rates) -> str:
    """A state at every chunk against one at the boundary."""
    budgets, orders = rates[BUDGET], rates[ORDER]
    return (
        f"`boundary`, which the workload tells where the article ends, reuses "
        f"{over(budgets, 'boundary')} % of the prompt tokens at {reach(budgets)} GiB. "
        f"`block_64`, a state every 64 tokens, reuses {over(budgets, 'block_64')} % there, "
        f"but {orders['as_given']['block_64']:.1f} % where an article's questions arrive in a row."
    )


def tail(rates: Rates) -> str:
    """Fixed distances from the prompt's end against learned positions."""
    gaps = [best(arms, TAIL) - best(arms, LEARNED) for _, arms in every(rates)]
    level = sum(gap >= -EQUAL for gap in gaps)
    return (
        f"`tail_1` and `tail_3` keep states at fixed distances before the prompt's end and learn nothing. "
        f"The better of them matches ({EQUAL} points) or beats the best learned arm "
        f"({names(LEARNED)}) at {level} of {len(gaps)} points of the sweep: "
        f"{min(gaps):+.1f} to {max(gaps):+.1f} points."
    )


def learned(rates: Rates) -> str:
    """How far `dp_3_branch` stays below `boundary`."""
    return (
        f"`dp_3_branch` stays below `boundary` by {gaps(rates[BUDGET])} points at "
        f"{listed(rates[BUDGET])} GiB, and by {gaps(rates[QUESTIONS])} points at "
        f"{listed(rates[QUESTIONS])} questions per article."
    )


def hashed(rates: Rates) -> str:
    """Where checkpoints at block boundaries reuse more than learned ones."""
    budgets = rates[BUDGET]
    more = {value: arms for value, arms in budgets.items() if lead(arms) > EQUAL}
    less = {value: arms for value, arms in budgets.items() if lead(arms) < -EQUAL}
    said = []
    if more:
        said.append(f"more than every learned arm at {at(more)}")
    if less:
        said.append(f"less than the best learned arm at {at(less)}")
    return f"`vllm_0_32` reuses {' and '.join(said) or 'as much as the best learned arm'}."


def at(group: Mapping[Value, Mapping[str, float]]) -> str:
    """Budgets, and by how much `vllm_0_32` differs there."""
    return f"{listed(group)} GiB (by {span(map(lead, group.values()))} points)"


def lead(arms: Mapping[str, float]) -> float:
    """Points of `vllm_0_32` above the best learned arm."""
    return arms["vllm_0_32"] - best(arms, LEARNED)


def every(rates: Rates) -> Iterable[tuple[Value, Mapping[str, float]]]:
    """Every point of every setting."""
    return (point for values in rates.values() for point in values.items())


def best(arms: Mapping[str, float], of: Sequence[str]) -> float:
    """The highest rate of some arms."""
    return max(arms[name] for name in of)


def over(values: Mapping[Value, Mapping[str, float]], arm: str) -> str:
    """Lowest and highest rate of an arm."""
    return span(arms[arm] for arms in values.values())


def span(values: Iterable[float]) -> str:
    """Smallest and largest of some numbers, by size."""
    sizes = sorted(abs(value) for value in values)
    low, high = f"{sizes[0]:.1f}", f"{sizes[-1]:.1f}"
    return low if low == high else f"{low} to {high}"


def reach(values: Iterable[Value]) -> str:
    """First and last value."""
    told = list(map(value_text, values))
    return f"{told[0]} to {told[-1]}"


def listed(values: Iterable[Value]) -> str:
    """All values."""
    return ", ".join(map(value_text, values))


def gaps(values: Mapping[Value, Mapping[str, float]]) -> str:
    """Points of `dp_3_branch` below `boundary`, value by value."""
    return ", ".join(f"{arms['boundary'] - arms['dp_3_branch']:.1f}" for arms in values.values())


def names(arms: Iterable[str]) -> str:
    """Arms as code."""
    return ", ".join(f"`{arm}`" for arm in arms)


if __name__ == "__main__":
    main()
