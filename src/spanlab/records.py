"""The rows of a run: one per finished request, and one per finished run of an arm; and the delays
of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

NS = 1e-9  # seconds per nanosecond: clocks count nanoseconds, records hold seconds
Times = TypeVar("Times", float, NDArray[np.float64], NDArray[np.int64])

#: Causes of prompt tokens that were not reused; with `reused` they sum exactly to the prompt of
#: each request.
LOSS_CAUSES = (
    "never_seen",  # no earlier prompt, nor its known answer, began with it
    "out_of_reach",  # an earlier prompt began with it; this cache has not computed it under a key of this prompt
    "never_stored",  # computed before and not stored since, or being computed again by another request
    "kv_evicted",  # stored and evicted since; one eviction explains one miss
    "state_evicted",  # KV is resident, but the recurrent state to resume from was evicted
    "state_never_placed",  # KV is resident, but no recurrent state was stored to resume from
    "alignment",  # behind the last block or kernel-grid boundary, or stored where the prompt cannot read it
    "last_token",  # the whole prompt matched: one token is computed for its logits
    "locked",  # not stored: all evictable memory was locked, or the admission rule rejected it
    "repair",  # reused, and recomputed by a repair with the whole prompt in view
)


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request of one run. Times are seconds on the backend's clock; token counts are
    prompt tokens.

    With position-independent caching, a "longest prefix" is a sum over the cache spans.

    matched    longest prefix whose KV is present (whole blocks)
    resumable  longest prefix from which computation could resume, by the contents of the store
    reused     tokens that were not computed; reused + computed = prompt, and reused + sum(lost_*) =
               prompt
    repaired   tokens that a repair recomputed, both reused and newly computed ones
    copied     tokens of spans that were copied to pages of the request
    seen       longest prefix that it shares with a prompt that arrived earlier in the run, or with
               that prompt and its known answer, cache salts apart: of the requests alone, and so
               the same in every arm that serves them as given. Equal times count in the order of
               the requests. Of sessions and clients, whose arrivals follow from the run, it is of
               the run's order; of chosen passages, of the prompts as they are served.

    `lost_out_of_reach`  that earlier prompt waits, is being computed or went to another replica; or
                         the cache keeps its
    beginning for other requests alone (whole prompts, private caches), or never stores it (text
    behind some spans). Position-independent caching computes spans, not prefixes: `lost_never_seen`
    are then tokens whose span was never computed, except for those that must lie within the longest
    seen prefix, which are `lost_out_of_reach`.
    """

    seed: int
    rate_rps: float | None  # None: the workload's own arrival times
    request_id: int
    group_id: int
    counted: bool  # False during warm-up
    arrived_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    seen_tokens: int
    matched_tokens: int
    resumable_tokens: int
    reused_tokens: int
    computed_tokens: int
    repaired_tokens: int
    copied_tokens: int
    lost_never_seen: int
    lost_out_of_reach: int
    lost_never_stored: int
    lost_kv_evicted: int
    lost_state_evicted: int
    lost_state_never_placed: int
    lost_alignment: int
    lost_last_token: int
    lost_locked: int
    lost_repair: int
    loaded_state_bytes: int
    captured_states: int
    captured_state_bytes: int
    preemptions: int
    recomputed_tokens: int  # tokens computed again after preemptions, prompt and output


def ttft(arrived: Times, first_token: Times) -> Times:
    """Time to first token, from the arrival, in the unit of the times."""
    return first_token - arrived


def e2e(arrived: Times, finished: Times) -> Times:
    """End-to-end latency, from the arrival to the last token, in the unit of the times."""
    return finished - arrived


def tpot(
    first_token: Times, finished: Times, output_tokens: int | NDArray[Any]
) -> NDArray[np.float64]:
    """Time per output token after the first, of times on one clock, in their unit; NaN for one
    token."""
    gaps = np.where(np.asarray(output_tokens) > 1, np.asarray(output_tokens) - 1, np.nan)
    return np.asarray((finished - first_token) / gaps)


def delays_of(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """Seconds per request, from columns of records: time in the queue, TTFT, E2E and TPOT.

    A real server does not tell the time of admission: `queue_s` is then absent.
    """
    arrived, first, last = (columns[f"{name}_s"] for name in ("arrived", "first_token", "finished"))
    queue = {"queue_s": columns["admitted_s"] - arrived} if "admitted_s" in columns else {}
    waits = {"ttft_s": ttft(arrived, first), "e2e_s": e2e(arrived, last)}
    return queue | waits | {"tpot_s": tpot(first, last, columns["output_tokens"])}


@dataclass(frozen=True, slots=True)
class RoutedRecord(Record):
    """A finished request of a run with several replicas, with the index of its replica."""

    replica: int

    @classmethod
    def of(cls, record: Record, replica: int) -> RoutedRecord:
        """Return the record with its replica."""
        return cls(
            **{field.name: getattr(record, field.name) for field in fields(Record)}, replica=replica
        )


@dataclass(frozen=True, slots=True)
class ArrangedRecord(Record):
    """A finished request of an arm that chooses passages, with the original indices of the served
    passages."""

    passages: list[int]

    @classmethod
    def of(cls, record: Record, passages: list[int]) -> ArrangedRecord:
        """Return the record with its passages."""
        return cls(
            **{field.name: getattr(record, field.name) for field in fields(Record)},
            passages=passages,
        )


@dataclass(slots=True)
class ReplicaRow:
    """Totals of one replica in a run."""

    requests: int = 0
    busy_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0

    def add(self, record: Record) -> None:
        """Count a finished request."""
        self.requests += 1
        self.preemptions += record.preemptions
        self.prompt_tokens += record.prompt_tokens
        self.reused_tokens += record.reused_tokens


@dataclass(frozen=True, slots=True)
class ServedRecord:
    """One request that a real server answered, with the fields of a Record that a client observes.

    `arrived_s` is the intended time, `sent_s` that at which the client sent it; None in runs of
    earlier versions. The server reports the token counts; `reused_tokens` is None if it does not.
    """

    seed: int
    rate_rps: float | None
    request_id: int
    group_id: int
    counted: bool
    arrived_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int | None
    sent_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One finished run on a real server.

    late_*         seconds from the intended time of a request to the time at which the client sent it
    failures       error messages by request id, of requests without a record
    other_lengths  number of answers whose length differs from the workload's
    began_s        time zero of the records on the machine's monotonic clock; None in runs of
                   earlier versions
    """

    seed: int
    rate_rps: float | None
    requests: int
    makespan_s: float
    late_mean_s: float
    late_max_s: float
    failures: dict[str, str]
    other_lengths: int
    began_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One finished run: one arm with one seed at one load.

    Resident bytes are those of the cache; means are weighted by time. With several replicas,
    numbers are sums over the replicas, and peaks are those of the sum.
    """

    seed: int
    rate_rps: float | None
    requests: int
    makespan_s: float
    busy_s: float
    steps: int
    preemptions: int
    kv_resident_mean_bytes: float
    state_resident_mean_bytes: float
    kv_resident_peak_bytes: int
    state_resident_peak_bytes: int
    inserted_bytes: int
    evicted_bytes: int
    timeline_s: list[float] = field(default_factory=list)  # at most a few hundred samples
    timeline_kv_bytes: list[int] = field(default_factory=list)
    timeline_state_bytes: list[int] = field(default_factory=list)
    # per request of one group: prompt length, match length and all stored checkpoint positions
    group_rounds: list[dict[str, int | list[int]]] = field(default_factory=list)
    # by feature: number of steps outside the range that the timing model was fitted to
    beyond: dict[str, int] = field(default_factory=dict)
    # seconds of fully batched steps for the offered work; None without a timing model
    demand_s: float | None = None
    replicas: list[ReplicaRow] = field(default_factory=list)  # empty for a single replica
