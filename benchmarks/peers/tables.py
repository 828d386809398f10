"""Tables and figure of the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot
from names import ARMS, ITEMSIZE, NO_CACHE, ORDERS, PEERS, SYSTEMS, TITLES
from pages import table

Results = dict[str, Any]


def seconds_of(results: Results, dtype: str, words: int, name: str, kind: str) -> list[float]:
    """Return the seconds of all trials; those of a system without a cache are cold in every order."""
    trials = results["rows"].get(f"{dtype}/{words}/{name}", [])
    return [trial["cold" if name in NO_CACHE else kind]["seconds"] for trial in trials]


def share_of(results: Results, dtype: str, name: str, kind: str) -> str:
    """Return the share of prompt tokens that a system reused at the most words that it has, in percent."""
    for words in reversed(results["words"]):
        if trials := results["rows"].get(f"{dtype}/{words}/{name}", []):
            shares = [
                trial.get(kind, {"reused": 0})["reused"] / trial["tokens"]
                for trial in trials
                if trial.get(kind, {"reused": 0})["reused"] is not None
            ]
            return f"{100 * median(shares):.0f} %" if shares else "not told"
    return "–"


def rows_of(results: Results, dtype: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a precision: medians, the largest spread, and the reused share."""
    for name in SYSTEMS:
        if not any(f"{dtype}/{words}/{name}" in results["rows"] for words in results["words"]):
            continue
        for kind in ORDERS:
            each = [seconds_of(results, dtype, words, name, kind) for words in results["words"]]
            spread = max((max(found) - min(found)) / median(found) for found in each if found)
            cells = [f"{median(found):.3f}" if found else "–" for found in each]
            yield TITLES[name], kind, *cells, f"{100 * spread:.0f} %", share_of(results, dtype, name, kind)


def best(results: Results, dtype: str, words: int, kind: str) -> tuple[str, list[float]] | None:
    """Return the fastest peer and its seconds."""
    found = {name: seconds_of(results, dtype, words, name, kind) for name in PEERS}
    found = {name: seconds for name, seconds in found.items() if seconds}
    return min(found.items(), key=lambda item: median(item[1]), default=None)


def goal_rows(results: Results, dtype: str) -> Iterator[tuple[str, ...]]:
    """Yield, for each length, our cold request beside the fastest peer's, and our shuffled ones."""
    for words in results["words"]:
        cold, shuffled = (best(results, dtype, words, kind) for kind in ("cold", "shuffled"))
        none = seconds_of(results, dtype, words, "none", "cold")
        if cold is None or shuffled is None or not none:
            continue
        gains = [
            f"{median(shuffled[1]) / median(ours):.1f} ×" if ours else "–"
            for arm in ("pic", "cached_order")
            for ours in [seconds_of(results, dtype, words, arm, "shuffled")]
        ]
        yield f"{words:,}", TITLES[cold[0]], f"{median(none) / median(cold[1]):.2f} ×", TITLES[shuffled[0]], *gains


COLD_GOAL, SHUFFLED_GOAL, SHUFFLED_WORDS = 1.2, 10, 1000


def goals_met(results: Results, dtype: str) -> str:
    """Return, as an item of a list, how a precision meets the two goals; empty where they cannot be told."""
    ratios = {}
    for words in results["words"]:
        peer, none = best(results, dtype, words, "cold"), seconds_of(results, dtype, words, "none", "cold")
        if peer is not None and none:
            ratios[words] = median(none) / median(peer[1])
    peer = best(results, dtype, SHUFFLED_WORDS, "shuffled")
    pic = seconds_of(results, dtype, SHUFFLED_WORDS, "pic", "shuffled")
    if not ratios or peer is None or not pic:
        return ""
    met = sum(ratio <= COLD_GOAL for ratio in ratios.values())
    cold = f"cold within {COLD_GOAL} times at {met} of {len(ratios)} lengths, {max(ratios.values()):.2f} at most"
    gain = median(peer[1]) / median(pic)
    return f"- {dtype}: {cold}; `pic` {gain:.1f} times as fast at {SHUFFLED_WORDS:,} shuffled words"


def lines_of(results: Results) -> str:
    """Return the tables of the page."""
    counts = [f"{words:,} words" for words in results["words"]]
    head = ("system", "request", *counts, "largest spread", "reused at most words")
    goals = (
        "words",
        "fastest peer, cold",
        "our cold ÷ its",
        "fastest peer, shuffled",
        "its ÷ `pic`",
        "its ÷ `cached_order`",
    )
    parts = [line for dtype in ITEMSIZE if (line := goals_met(results, dtype))]
    parts += ["\n![Seconds to the first token of shuffled prompts, over words](ttft.png)\n"]
    for dtype in ITEMSIZE:
        if rows := list(rows_of(results, dtype)):
            parts += [f"**{dtype}**: seconds to the first token, medians\n", table(head, rows), ""]
            parts += [table(goals, goal_rows(results, dtype)), ""]
    for key, slow in results["left_out"].items():
        dtype, name = key.split("/")
        limit = f"more than the limit of {results['limit_s']:g} s; more words were not measured."
        parts.append(f"{TITLES[name]}, {dtype}: {slow['words']:,} words took {slow['seconds']:.0f} s cold, {limit}\n")
    measured = {key.rpartition("/")[2] for key in results["rows"]}
    if absent := [TITLES[name] for name in SYSTEMS if name not in measured]:
        parts.append(f"Not measured: {', '.join(absent)}.\n")
    peers = ", ".join(f"{TITLES[name]} {version}" for name, version in results["peers"].items())
    repeats = max(len(trials) for trials in results["rows"].values())
    parts.append(
        f"{repeats} trials, words {results['source']}; {results['threads']} threads on {results['machine']}; {peers}, "
        f"transformers {results['versions']['transformers']}, torch {results['versions']['torch']}; commit "
        f"{results['commit']}.\n"
    )
    return "\n".join(parts)


def figure(results: Results, path: Path) -> None:
    """Draw the time of shuffled requests over words, one panel per precision."""
    dtypes = [dtype for dtype in ITEMSIZE if any(key.startswith(f"{dtype}/") for key in results["rows"])]
    drawn, axes = pyplot.subplots(
        1, len(dtypes), figsize=(4.6 * len(dtypes), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for number, name in enumerate(SYSTEMS):
            each = [(words, seconds_of(results, dtype, words, name, "shuffled")) for words in results["words"]]
            points = [(words, median(seconds)) for words, seconds in each if seconds]
            if points:
                style = "-" if name in ARMS else "--"
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    marker="o",
                    ms=3,
                    color=f"C{number}",
                    label=TITLES[name].replace("`", ""),
                )
        axis.set(xscale="log", yscale="log", xlabel="words", title=dtype)
        axis.set_xticks(results["words"], [f"{words:,}" for words in results["words"]])
        axis.set_xticks([], minor=True)
    axes[0][0].set_ylabel("seconds to the first token, shuffled")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}  # some have one precision alone
    drawn.legend(lines.values(), lines.keys(), fontsize=7, loc="outside right center")
    drawn.savefig(path, dpi=100)
    pyplot.close(drawn)
