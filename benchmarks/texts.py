"""Sentences and tables of the pages that are derived from published numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answer_texts import answers_claim, methods_of_answers
from headline import read_data
from limit_texts import coverage_table, in_turns, limits_table, million, simulators_claim, sweep_speed
from log_texts import break_claim, explain_claim, plan_claim, twin_claim, twin_errors, twin_margins
from pages import table
from policy_texts import policies_claim, policies_table

from spanlab.analyses.families import NO_LEAD

Value = str | float
Rows = Sequence[Mapping[str, Any]]
#: Token hit rate in percent, by setting, value and arm.
Rates = Mapping[str, Mapping[Value, Mapping[str, float]]]

BUDGET, QUESTIONS, ORDER = "store.total_gib", "workload.questions_per_document", "arrivals.order"
PASSAGES = "workload.rag.order"
LEARNED = ("dp_3", "dp_8", "dp_3_branch")
TAIL = ("tail_1", "tail_3")
PREAMBLE = "mixed"  # the front page shows only these points of families_sim
CLEAR = 1.1  # smallest ratio of two families' mean TTFTs that is counted as a clear lead
TIMED = ("boundary", "branch", "dp_3", "last")  # arms whose dependence on step times is shown
EQUAL = 0.5  # largest difference in points of two rates that count as equal


@dataclass(frozen=True)
class Text:
    """A text of the pages: its JSON and CSV files below benchmarks/, and the function that makes it from them."""

    sources: tuple[str, ...]
    make: Callable[..., str]

    def reads(self, names: set[str]) -> bool:
        """Return whether one of these results is a source."""
        return any(source.rpartition("/")[0] in names for source in self.sources)


def texts_of(names: set[str], root: Path) -> dict[str, str]:
    """Return the texts that read one of these results, by mark; texts with a missing source are omitted."""
    folder = root / "benchmarks"
    texts = {}
    for mark, text in TEXTS.items():
        paths = [folder / source for source in text.sources]
        if text.reads(names) and all(path.exists() for path in paths):
            texts[mark] = text.make(*map(read_data, paths))
    return texts


def rates_of(rows: Rows) -> Rates:
    """Return the rows of a sweep as nested mappings."""
    rates: dict[str, dict[Value, dict[str, float]]] = {}
    for row in rows:
        arms = rates.setdefault(row["axis"], {}).setdefault(row["value"], {})
        arms[row["arm"]] = 100 * row["token_hit_rate"]
    return rates


def value_text(value: Value) -> str:
    """Return a value of a setting as short text."""
    return value if isinstance(value, str) else f"{value:g}"


def points_of(leads: Rows) -> dict[tuple[tuple[str, str], ...], Rows]:
    """Return the rows of each point, one for each family, by the point's settings."""
    points: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for row in leads:
        settings = [(key.removeprefix("settings."), value) for key, value in row.items() if key[:9] == "settings."]
        point = tuple((key, value_text(value)) for key, value in settings if value is not None)
        points.setdefault(point, []).append(row)
    return dict(points)


def winners_table(leads: Rows) -> str:
    """Return the leading families with mixed preambles: rows by the first two settings, columns by the others."""
    points = points_of(leads)
    mixed = {tuple(dict(point).values()): rows for point, rows in points.items() if ("preamble", PREAMBLE) in point}
    row_keys, column_keys = (list(dict.fromkeys(key[half] for key in mixed)) for half in (slice(2), slice(2, None)))
    head = (" · ".join(list(dict(next(iter(points))))[:2]), *map(", ".join, column_keys))
    rows = [
        (" · ".join(row_key), *(winner_cell(mixed.get((*row_key, *column_key))) for column_key in column_keys))
        for row_key in row_keys
    ]
    return table(head, rows)


def winner_cell(families: Rows | None) -> str:
    """Return leading family, speedup over the first family and token hit rate; in brackets if no lead is shown."""
    if not families or families[0]["lead.family"] is None:
        return "failed"
    best = next(row for row in families if row["entries.family"] == row["lead.family"])
    speedup = "–" if best["entries.speedup.mean"] is None else f"{best['entries.speedup.mean']:.2f} ×"
    speedup = "1 ×" if best is families[0] else speedup
    cell = f"{best['entries.family'].replace('_', ' ')} {speedup}, {100 * best['entries.token_hit_rate']:.0f} %"
    return cell if best["lead.shown"] else f"({cell})"


def winners(leads: Rows) -> str:
    """Return how often each family leads, alone and corrected, by how much, and how often no lead is shown."""
    count = len(points_of(leads))
    led = [row for row in leads if row["lead.family"] and row["entries.family"] == row["lead.family"]]
    sentences = []
    for family in dict.fromkeys(row["lead.family"] for row in led if row["lead.shown_alone"] or row["lead.shown"]):
        alone = sum(row["lead.shown_alone"] for row in led if row["lead.family"] == family)
        ratios = [row["lead.ratio.mean"] for row in led if row["lead.family"] == family and row["lead.shown"]]
        sentences.append(f"`{family}` has the lowest mean TTFT at {alone} of {count} points, each judged alone")
        sentences.append(
            f"It leads at {len(ratios)} of {count} points after Holm's correction, with arms chosen on other seeds"
        )
        if ratios:
            sentences.append(
                f"There, the next family takes {min(ratios):.2f} to {max(ratios):.2f} times as long; "
                f"{CLEAR:g} times or more at {sum(ratio >= CLEAR for ratio in ratios)}"
            )
    unclear = count - sum(row["lead.shown"] for row in led)
    sentences.append(f"{NO_LEAD.capitalize()} is shown at {unclear} of {count} points, corrected")
    return "".join(f"- {sentence}.\n" for sentence in sentences)


def timing(small: Rows, large: Rows) -> str:
    """Return how token counts depend on step times, for a small and a large store under two rooflines."""
    (low, slow), (high, fast) = next(iter(rates_of(small).values())).items()
    (less, first), (more, second) = next(iter(rates_of(large).values())).items()
    moved = {arm: abs(second[arm] - rate) for arm, rate in first.items()}
    most = max(moved, key=lambda arm: moved[arm])
    others = max(change for arm, change in moved.items() if arm != most)
    head = ("peak compute, 8 MiB", *(f"`{arm}`" for arm in TIMED))
    rows = [
        (f"{100 * share:g} %", *(f"{arms[arm]:.1f} %" for arm in TIMED)) for share, arms in ((high, fast), (low, slow))
    ]
    return (
        "Token counts depend on step times: through the order of events, and the memory of running requests.\n"
        "With 8 MiB (`quality_clean backend=sim`), token hit rates change with the share of peak compute:\n\n"
        f"{table(head, rows)}\n"
        f"With 64 GiB (`quality_sim`), {100 * less:g} and {100 * more:g} % of peak change `{most}` by "
        f"{moved[most]:.1f} points.\nEvery other arm changes by at most {others:.1f} points.\n"
    )


def claims(rows: Rows) -> str:
    """Return the findings of the sweep, each sentence with its range."""
    rates = rates_of(rows)
    sentences = (dense(rates), tail(rates), learned(rates), hashed(rates))
    return "".join(f"- {sentence}\n" for sentence in sentences)


def dense(rates: Rates) -> str:
    """Compare a state at every chunk with one at the boundary."""
    budgets, orders = rates[BUDGET], rates[ORDER]
    return (
        f"`boundary` is told where the article ends. It reuses {over(budgets, 'boundary')} % of the prompt tokens at "
        f"{ends(budgets)} GiB. `block_64` stores a state every 64 tokens. It reuses "
        f"{over(budgets, 'block_64')} % there. With an article's questions in a row, it reuses "
        f"{orders['as_given']['block_64']:.1f} %."
    )


def tail(rates: Rates) -> str:
    """Compare states at fixed distances from the prompt's end with learned positions."""
    points = [arms for values in rates.values() for arms in values.values()]
    gaps = [best(arms, TAIL) - best(arms, LEARNED) for arms in points]
    level = sum(gap >= -EQUAL for gap in gaps)
    learned_arms = ", ".join(f"`{arm}`" for arm in LEARNED)
    return (
        f"`tail_1` and `tail_3` keep states at fixed distances before the prompt's end. They learn nothing. Learned "
        f"arms are {learned_arms}. The better tail matches or beats the best learned arm at {level} of {len(gaps)} "
        f"points, within {EQUAL} points. The differences are {min(gaps):+.1f} to {max(gaps):+.1f} points. These are "
        f"means over seeds, compared without a test."
    )


def learned(rates: Rates) -> str:
    """Return the gap between `dp_3_branch` and `boundary`, by budget and by questions per article."""
    return (
        f"`dp_3_branch` stays below `boundary` by {span(gaps(rates[BUDGET]))} points at {ends(rates[BUDGET])} GiB. "
        f"With {ends(rates[QUESTIONS])} questions per article, the difference is {span(gaps(rates[QUESTIONS]))} points."
    )


def hashed(rates: Rates) -> str:
    """Return the budgets at which states at block boundaries reuse more or less than learned ones."""
    budgets = rates[BUDGET]
    more = {value: arms for value, arms in budgets.items() if lead(arms) > EQUAL}
    less = {value: arms for value, arms in budgets.items() if lead(arms) < -EQUAL}
    sentences = []
    if more:
        sentences.append(f"`vllm_0_32` reuses more than every learned arm at {budgets_with_leads(more)}.")
    if less:
        sentences.append(f"`vllm_0_32` reuses less than the best learned arm at {budgets_with_leads(less)}.")
    return " ".join(sentences) or "`vllm_0_32` reuses as much as the best learned arm."


def budgets_with_leads(group: Mapping[Value, Mapping[str, float]]) -> str:
    """Return budgets, and the difference of `vllm_0_32` at these budgets."""
    return f"{listed(group)} GiB (by {span(map(lead, group.values()))} points)"


def lead(arms: Mapping[str, float]) -> float:
    """Return the points of `vllm_0_32` above the best learned arm."""
    return arms["vllm_0_32"] - best(arms, LEARNED)


def best(arms: Mapping[str, float], of: Sequence[str]) -> float:
    """Return the highest rate of some arms."""
    return max(arms[name] for name in of)


def over(values: Mapping[Value, Mapping[str, float]], arm: str) -> str:
    """Return the lowest and highest rate of an arm."""
    return span(arms[arm] for arms in values.values())


def span(values: Iterable[float]) -> str:
    """Return the smallest and largest absolute value."""
    sizes = sorted(abs(value) for value in values)
    low, high = f"{sizes[0]:.1f}", f"{sizes[-1]:.1f}"
    return low if low == high else f"{low} to {high}"


def listed(values: Iterable[Value]) -> str:
    """Return all values."""
    return ", ".join(map(value_text, values))


def gaps(values: Mapping[Value, Mapping[str, float]]) -> list[float]:
    """Return the points of `dp_3_branch` below `boundary`, value by value."""
    return [arms["boundary"] - arms["dp_3_branch"] for arms in values.values()]


def ends(values: Iterable[Value]) -> str:
    """Return the first and the last value."""
    texts = list(map(value_text, values))
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def pic_claims(rows: Rows) -> str:
    """Return the findings of `pic_sweep` on prefix caches and position-independent caches, with ranges."""
    rates = rates_of(rows)
    orders, budgets = rates[PASSAGES], rates[BUDGET]
    anywhere = [arm for arm in orders["shuffled"] if arm not in ("none", "block_hash_16", "radix")]
    shuffled = [arms[arm] for arms in budgets.values() for arm in anywhere]
    ordered = [orders[order]["radix"] for order in ("ranked", "fixed")]
    return (
        f"Passages are shuffled, and the store has {min(budgets):g} to {max(budgets):g} GiB.\n"
        f"`radix` reuses {span(arms['radix'] for arms in budgets.values())} % of the prompt tokens.\n"
        f"Position-independent caches reuse {span(shuffled)} %.\n"
        f"With ranked or fixed order, `radix` reuses {span(ordered)} %.\n"
    )


def conformance_total(*releases: dict[str, Any]) -> str:
    """Return how many random cases of vLLM's own code the presets reproduce, release by release."""
    names = ("cases", "equal", "requests", "requests_equal", "steps")
    lines = []
    for results in releases:
        cases, equal, requests, reuse, steps = (sum(row[name] for row in results["rows"].values()) for name in names)
        lines.append(f"{results['system']}: {equal:,} of {cases:,} cases are equal in every one of {steps:,} steps.\n")
        lines.append(f"{reuse:,} of {requests:,} requests reuse as many tokens (commit {results['commit']}).\n")
    return "".join(lines)


def live_total(results: dict[str, Any]) -> str:
    """Return how many requests of a running server the preset decides alike."""
    rows = {server: sum(map(Counter, runs.values()), Counter()) for server, runs in results["rows"].items()}
    other = {server: row for server, row in rows.items() if row["same_reuse"] < row["requests"]}
    equal = sum((row for server, row in rows.items() if server not in other), Counter())
    text = (
        f"{results['system']}, running. Commits {', '.join(dict.fromkeys(results['commits'].values()))}.\n"
        f"{equal['same_reuse']:,} of {equal['requests']:,} requests reuse as many tokens as in the simulator.\n"
        f"{equal['equal_steps']:,} of {equal['steps']:,} steps compute the same tokens.\n"
    )
    if other:
        row = sum(other.values(), Counter())
        differing = f"{row['requests'] - row['same_reuse']:,} of {row['requests']:,}"
        text += (
            f"With its own block size, a hybrid on that server differs in {differing}. The server has a fault there.\n"
        )
    return text


def live_claim(
    results: dict[str, Any], slots: dict[str, Any], sequences: dict[str, Any], *releases: dict[str, Any]
) -> str:
    """Return one line of all live requests, and of the random cases of each release of vLLM.

    Tests require the stored answers of `slots` and `sequences` to be equal.
    """
    rows = sum((Counter(row) for runs in results["rows"].values() for row in runs.values()), Counter())
    stored = (sum(len(case["reused"]) for case in cases.values()) for cases in (slots, sequences))
    llama, mistral = (f"{count:,} of {count:,}" for count in stored)
    cases = [
        f"{release['system']}: {sum(row['equal'] for row in release['rows'].values()):,} of "
        f"{sum(row['cases'] for row in release['rows'].values()):,}"
        for release in releases
    ]
    return (
        "Running servers agree with their presets on reused tokens. "
        f"{results['system'].partition(' for ')[0]}: {rows['same_reuse']:,} of {rows['requests']:,} requests; "
        f"mistral.rs 0.9.5: {mistral}; llama.cpp 0c1e57098: {llama} ([how](docs/rendezvous.md)). "
        "Random cases are decided step by step as by vLLM's own scheduler. "
        f"{'; '.join(cases)} ([what a release changes](docs/releases.md)).\n"
    )


TWINS = ("rtx4090_8b", "rtxpro6000_8b", "rtxpro6000_32b", "rtxpro6000_30b_a3b")
TWIN_HEADLINES = tuple(f"twin/{name}/headline.json" for name in TWINS)
TEXTS = {
    "answers_table": Text(("pic_answers/headline.json",), methods_of_answers),
    "answers_claim": Text(("pic_answers/headline.json",), answers_claim),
    "policies_table": Text(("hybrid_policies_sim/rules_by_seed.csv",), policies_table),
    "policies_claim": Text(("hybrid_policies_sim/rules_by_seed.csv",), policies_claim),
    "explain_claim": Text(("explain/headline.json",), explain_claim),
    "break_claim": Text(("explain/agent/headline.json",), break_claim),
    "plan_claim": Text(("plan/headline.json",), plan_claim),
    "twin_errors": Text(TWIN_HEADLINES, twin_errors),
    "twin_margins": Text(TWIN_HEADLINES, twin_margins),
    "twin_claim": Text(TWIN_HEADLINES, twin_claim),
    "claims": Text(("quality_sweep/sweep.csv",), claims),
    "winners": Text(("families_sim/leads.csv",), winners),
    "winners_table": Text(("families_sim/leads.csv",), winners_table),
    "timing": Text(("quality_sweep/timing_small/sweep.csv", "quality_sweep/timing_large/sweep.csv"), timing),
    "pic_claims": Text(("pic_sweep/sweep.csv",), pic_claims),
    "conformance_total": Text(
        ("conformance/results_vllm_0_32.json", "conformance/results_vllm_0_33.json"), conformance_total
    ),
    "live_total": Text(("rendezvous/results.json",), live_total),
    "live_claim": Text(
        (
            *("rendezvous/results.json", "../tests/oracle/llama_cpp.json", "../tests/oracle/mistralrs_0_9_5.json"),
            *("conformance/results_vllm_0_32.json", "conformance/results_vllm_0_33.json"),
        ),
        live_claim,
    ),
    "coverage": Text(("coverage/results.json",), coverage_table),
    "must_hold": Text(("must_hold/results.json",), limits_table),
    "in_turns": Text(("must_hold/in_turns.json",), in_turns),
    "million": Text(("must_hold/million.json",), million),
    "simulators_claim": Text(("peers/simulators.json",), simulators_claim),
    "sweep_speed": Text(("must_hold/sweep_speed.json",), sweep_speed),
}
