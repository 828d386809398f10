"""Changes from one arm to another, request by request: who loses reuse, to which cause, and what it
costs in TTFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.records import LOSS_CAUSES, ttft
from spanlab.report.table import Field, count, percent, seconds, tabulate, word
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis
from spanlab.settings.study import Study

ColumnMap = Mapping[str, NDArray[Any]]
Ints = NDArray[np.int64]
SHOWN = 10  # requests of the printed table
SLOWER = 0.05  # a TTFT that grows by more counts as slower


@dataclass(frozen=True)
class RequestChanges:
    """The requests of one seed in two arms, in order of their ids.

    `before`, `after`  columns of their records
    """

    seed: int
    before: ColumnMap
    after: ColumnMap

    @property
    def tokens(self) -> Ints:
        """Reused tokens after minus before, int64 [requests]."""
        difference: Ints = (
            self.after["reused_tokens"].astype(np.int64) - self.before["reused_tokens"]
        )
        return difference

    def cause(self, name: str) -> Ints:
        """Tokens that a cause loses after minus before, int64 [requests]."""
        key = f"lost_{name}"
        difference: Ints = self.after[key].astype(np.int64) - self.before[key]
        return difference

    def main_causes(self) -> list[str]:
        """The cause that grows most, of each request; empty where none grows."""
        grown = np.stack([self.cause(name) for name in LOSS_CAUSES])
        largest = grown.argmax(axis=0)
        return [
            LOSS_CAUSES[index] if grown[index, request] > 0 else ""
            for request, index in enumerate(largest.tolist())
        ]

    def delays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """TTFT before and after, in seconds."""
        first = [ttft(arm["arrived_s"], arm["first_token_s"]) for arm in (self.before, self.after)]
        return np.asarray(first[0], np.float64), np.asarray(first[1], np.float64)


def pair_requests(before: ColumnMap, after: ColumnMap, seed: int) -> RequestChanges:
    """Pair the counted requests of two runs by their ids; a request of one run alone is an
    error."""
    sides = []
    for columns in (before, after):
        counted = np.flatnonzero(columns["counted"].astype(bool))
        rows = counted[np.argsort(columns["request_id"][counted], kind="stable")]
        sides.append({name: values[rows] for name, values in columns.items()})
    assert np.array_equal(sides[0]["request_id"], sides[1]["request_id"]), (
        "both arms serve the same requests"
    )
    return RequestChanges(seed, *sides)


def summarise(pairs: Sequence[RequestChanges]) -> dict[str, Any]:
    """Return the entry of an arm in `summary.json`, over all seeds."""
    tokens = np.concatenate([pair.tokens for pair in pairs])
    prompt = sum(int(pair.before["prompt_tokens"].sum()) for pair in pairs)
    before, after = (
        np.concatenate(side) for side in zip(*(pair.delays() for pair in pairs), strict=True)
    )
    loses = tokens < 0
    causes = {
        name: int(np.concatenate([pair.cause(name) for pair in pairs])[loses].sum())
        for name in LOSS_CAUSES
    }
    return {
        "requests": len(tokens),
        "lose": int(loses.sum()),
        "gain": int((tokens > 0).sum()),
        "lost_tokens": int(-tokens[loses].sum()),
        "gained_tokens": int(tokens[tokens > 0].sum()),
        "hit_rate_change": float(tokens.sum() / prompt) if prompt else 0.0,
        "preemptions_change": sum(
            int(p.after["preemptions"].sum() - p.before["preemptions"].sum()) for p in pairs
        ),
        "ttft_before_s": float(before.mean()),
        "ttft_after_s": float(after.mean()),
        "slower": int((after > (1 + SLOWER) * before).sum()),
        "faster": int((before > (1 + SLOWER) * after).sum()),
        "causes": causes,
    }


_ARM_FIELDS = (
    Field("arm", "arm", word, left=True),
    Field("requests", "requests", count),
    Field("lose", "reuse\nless", count),
    Field("gain", "reuse\nmore", count),
    Field("lost_tokens", "tokens\nlost", count),
    Field("gained_tokens", "tokens\ngained", count),
    Field("hit_rate_change", "hit rate,\nchange", percent),
    Field("preemptions_change", "preemptions,\nchange", count, keep=3),
    Field("ttft_before_s", "TTFT mean\nbefore", seconds, keep=1),
    Field("ttft_after_s", "TTFT mean\nafter", seconds, keep=1),
    Field("slower", "slower", count, keep=2),
    Field("faster", "faster", count, keep=2),
    Field("main", "those that lose:\nmain cause", word, left=True),
)
_REQUEST_FIELDS = (
    Field("request", "request", word, left=True),
    Field("arm", "arm", word, left=True),
    Field("prompt_tokens", "prompt\ntokens", count),
    Field("reused_before", "reused\nbefore", count),
    Field("reused_after", "reused\nafter", count),
    Field("change", "change", count),
    Field("cause", "cause that\ngrows most", word, left=True),
    Field("ttft_before_s", "TTFT\nbefore", seconds, keep=1),
    Field("ttft_after_s", "TTFT\nafter", seconds, keep=1),
)


def _rows(arm: str, pair: RequestChanges) -> list[dict[str, Any]]:
    """Rows of the requests whose reuse changes, those that lose most first."""
    tokens, causes, (before, after) = pair.tokens, pair.main_causes(), pair.delays()
    order = [row for row in np.argsort(tokens, kind="stable").tolist() if tokens[row]]
    return [
        {
            "request": f"{int(pair.before['request_id'][row])}, seed {pair.seed}",
            "arm": arm,
            "prompt_tokens": int(pair.before["prompt_tokens"][row]),
            "reused_before": int(pair.before["reused_tokens"][row]),
            "reused_after": int(pair.after["reused_tokens"][row]),
            "change": int(tokens[row]),
            "cause": causes[row].replace("_", " "),
            "ttft_before_s": float(before[row]),
            "ttft_after_s": float(after[row]),
        }
        for row in order
    ]


def changes_of_study(finished: Finished) -> Findings:
    """Compare every arm with the baseline, request by request."""
    baseline = finished.study.runs.baseline
    if baseline not in finished.files:
        raise ValueError(
            f"baseline={baseline} with analyses=changes: it failed, {finished.failed[baseline]}"
        )
    columns = {name: files.columns() for name, files in finished.files.items()}
    pairs = {
        name: [pair_requests(columns[baseline][cell], by_cell[cell], cell.seed) for cell in by_cell]
        for name, by_cell in columns.items()
        if name != baseline
    }
    entries = {name: summarise(of_arm) for name, of_arm in pairs.items()}
    arm_rows = []
    for name, entry in entries.items():
        cause, tokens = max(entry["causes"].items(), key=itemgetter(1))
        main = f"{cause.replace('_', ' ')}: {tokens:,} tokens" if tokens > 0 else ""
        arm_rows.append({"arm": name, "main": main, **entry})
    requests = sorted(
        (row for name in pairs for pair in pairs[name] for row in _rows(name, pair)),
        key=lambda row: int(row["change"]),
    )
    title = f"{finished.name} · {footer(finished)}"
    notes = (
        f"before = {baseline}, the baseline; after = the arm; slower, faster = TTFT that changes by more than 5 %",
        "main cause = what the requests that reuse less lose more tokens to; the causes are those of the summary",
    )
    losers = [row for row in requests if row["change"] < 0][:SHOWN]
    of_losers = f"the {len(losers)} that lose most; changes_requests.csv has all {len(requests):,} that change"
    all_requests = tabulate(
        "changes_requests", "Requests whose reuse changes", _REQUEST_FIELDS, requests, ()
    )
    return Findings(
        summary={"changes": entries},
        tables=(
            tabulate(
                "changes",
                f"Changes from {baseline}, request by request\n{title}",
                _ARM_FIELDS,
                arm_rows,
                notes,
            ),
            *(
                [
                    tabulate(
                        "changes_worst", "Requests that lose", _REQUEST_FIELDS, losers, (of_losers,)
                    )
                ]
                if losers
                else ()
            ),
        ),
        further=(all_requests,),
    )


def _check(study: Study) -> None:
    """Raise ValueError without a baseline among the arms, and for a server, which reports no
    causes."""
    if study.runs.baseline not in study.chosen():
        raise ValueError(
            f"baseline={study.runs.baseline} with analyses=changes: expected one of the arms that run"
        )
    if study.backend == "server":
        raise ValueError(
            "backend=server with analyses=changes: expected sim or engine, for a server reports no causes"
        )


ANALYSES.add(Analysis("changes", changes_of_study, needs=(ARMS,), check=_check))
