"""The timing side channel of a shared prefix cache: what a tenant learns about another tenant's prompts from TTFT.

    .venvs/sim/bin/python benchmarks/isolation/measure.py

An 8B model on one H100 with 16 GiB of KV, simulated by the roofline model. Every second a victim asks about a document
of its own. Half a second later another tenant sends a probe: half of them begin with that document, as guessed, half
with one that nobody asked for. It sees the TTFT of its own probes alone. Other traffic arrives as a Poisson process.
Writes `results.json` and `README.md` beside this file: the median TTFT of both kinds of probes, tokens that they
shared, and how well the two kinds are told apart (the area under the ROC curve: 1.0 always, 0.5 never), with and
without a salt per tenant.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import facts, write_results
from pages import table

from spanlab.build import build_policy, build_timing
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.records import Record
from spanlab.settings import Study
from spanlab_sim.run import simulate

PROBES = 200
GAP_NS = 1_000_000_000  # between two probes
KEYS = ["model=llama-3.1-8b", "hardware=h100", "store=gib_16", "tracking=none"]


def tokens(rng: np.random.Generator, count: int) -> Span:
    """Tokens that nobody else has."""
    return Span(rng.integers(0, 128_000, count).astype(np.int32), reusable=True)


def asked(rng: np.random.Generator, length: int, rate_rps: float, salted: bool) -> tuple[list[Request], list[int]]:
    """Requests in order of arrival, and the ids of probes: those of the victim's documents, then the others."""
    known, novel = ([tokens(rng, length) for _ in range(PROBES)] for _ in range(2))
    victim, spy = ("victim", "spy") if salted else ("", "")
    found = [Request(0, 0, (one, tokens(rng, 32)), 1, at * GAP_NS, victim) for at, one in enumerate(known)]
    for at, which in enumerate(rng.permutation(PROBES)):  # the lower half are guessed right
        document = known[at] if which < PROBES // 2 else novel[at]
        found.append(Request(int(which), 1, (document, tokens(rng, 8)), 1, at * GAP_NS + GAP_NS // 2, spy))
    stop = PROBES * GAP_NS
    times = np.cumsum(rng.exponential(1e9 / rate_rps, int(2 * rate_rps * stop / 1e9))) if rate_rps else np.empty(0)
    for time in times[times < stop]:
        found.append(Request(0, 2, (tokens(rng, int(rng.integers(100, 2_000))),), 64, int(time), "others"))
    found.sort(key=lambda one: one.arrived_at)
    probes = [0] * PROBES
    for at, one in enumerate(found):
        if one.group_id == 1:
            probes[one.id] = at
    return [replace(one, id=at) for at, one in enumerate(found)], probes


def measured(study: Study, length: int, rate_rps: float, salted: bool) -> dict[str, Any]:
    """What the spy sees at one prompt length and load."""
    requests, probes = asked(np.random.default_rng([length, int(rate_rps)]), length, rate_rps, salted)
    policy = build_policy(study, study.arms["lru"], 0, length + 100)
    seen: dict[int, Record] = {}

    def note(record: Record) -> None:
        seen[record.request_id] = record

    simulate(requests, policy, study.batch, build_timing(study), note)
    ttft = np.array([seen[at].first_token_s - seen[at].arrived_s for at in probes]) * 1e3
    shared = sum(seen[at].reused_tokens for at in probes)
    hit, miss = ttft[: PROBES // 2], ttft[PROBES // 2 :]
    told = mannwhitneyu(miss, hit).statistic / (len(hit) * len(miss))
    return {
        "document_tokens": length,
        "other_rps": rate_rps,
        "salted": salted,
        "ttft_of_known_ms": float(np.median(hit)),
        "ttft_of_novel_ms": float(np.median(miss)),
        "shared_tokens": int(shared),
        "told_apart": float(told),
    }


HEAD = ("document, tokens", "other requests / s", "salt per tenant", "TTFT known", "TTFT novel", "told apart")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table."""
    delays = (f"{row[key]:.1f} ms" for key in ("ttft_of_known_ms", "ttft_of_novel_ms"))
    salted = "yes" if row["salted"] else "no"
    return f"{row['document_tokens']:,}", f"{row['other_rps']:g}", salted, *delays, f"{row['told_apart']:.2f}"


def page(rows: list[dict[str, Any]], commit: str) -> str:
    """The page beside the results: a row for each length and load, with and without salts."""
    lines = [
        "# Timing side channel of a shared prefix cache",
        "",
        "This page shows what a tenant can infer about another tenant's prompts from the TTFT of its own probes.",
        "`measure.py` describes the method.",
        "",
        table(HEAD, map(cells, rows)),
    ]
    found = f"Told apart: 1 always, 0.5 never; area under the ROC curve over {PROBES} probes, one seed. Simulated, H100"
    return "\n".join([*lines, f"{found}, commit {commit}.", ""])


def main() -> None:
    """Measure every length and load, with and without salts."""
    study = compose("eviction_sim", KEYS)
    rows = [
        measured(study, length, rate, salted)
        for length in (256, 1_024, 4_096)
        for rate in (0.0, 4.0, 8.0)
        for salted in (False, True)
    ]
    known = facts()
    write_results(HERE / "results.json", known | {"rows": rows})
    (HERE / "README.md").write_text(page(rows, known["commit"]))
    print(page(rows, known["commit"]))


if __name__ == "__main__":
    main()
