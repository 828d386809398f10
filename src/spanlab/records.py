"""The rows a run leaves behind: one per finished request, one per finished run of an arm."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

#: Why a prompt token was not reused; with `reused` the causes sum to the prompt, exactly, per request.
LOSS_CAUSES = (
    "never_seen",  # no earlier prompt began with it
    "never_stored",  # was computed before, by a policy that keeps nothing
    "kv_evicted",  # was stored, and gave way to something else
    "state_evicted",  # its KV is here, the recurrent state that would make it useful gave way
    "state_never_placed",  # its KV is here, no state was ever put close enough
    "alignment",  # behind the last block or kernel-grid boundary
    "last_token",  # the whole prompt was known: one token is computed for its logits
    "locked",  # the store refused it: everything it could have displaced was in use, or it was new to an admission rule
    "repair",  # was read from the store, and computed again in the prompt's full context
)


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request of one run. Times are seconds on the backend's clock; token counts are prompt tokens.

    What "longest prefix" says of a prefix cache is for position-independent caching a sum over the cache spans.

    matched    longest prefix whose KV is present (whole blocks)
    resumable  longest prefix from which computation may restart by the store's contents alone
    reused     tokens that were in fact not computed; reused + computed = prompt, and reused + sum(lost_*) = prompt
    repaired   tokens that a repair computed again, whether they came from the store or had just been computed alone
    copied     tokens of spans that the request copied for itself
    """

    seed: int
    rate_rps: float | None  # None: the workload's own arrival times
    request_id: int
    group_id: int
    counted: bool  # False while the run warms up
    arrived_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    seen_tokens: int  # longest prefix that any earlier prompt of the run began with: the infinite-cache bound
    matched_tokens: int
    resumable_tokens: int
    reused_tokens: int
    computed_tokens: int
    repaired_tokens: int
    copied_tokens: int
    lost_never_seen: int
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


@dataclass(frozen=True, slots=True)
class RoutedRecord(Record):
    """A finished request of a run with several replicas, and the number of the one that served it."""

    replica: int

    @classmethod
    def of(cls, record: Record, replica: int) -> RoutedRecord:
        """The record with its replica."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(Record)}, replica=replica)


@dataclass(frozen=True, slots=True)
class ArrangedRecord(Record):
    """A finished request of an arm that chooses passages: their numbers as served, counted in the given order."""

    passages: list[int]

    @classmethod
    def of(cls, record: Record, passages: list[int]) -> ArrangedRecord:
        """The record with its passages."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(Record)}, passages=passages)


@dataclass(slots=True)
class ReplicaRow:
    """What one of several replicas did in a run."""

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
    """One request that a real server answered: what a client can see, in the fields of a Record.

    `arrived_s` is the intended time; token counts are the server's. `reused_tokens` is None where it does not say.
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


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One finished run on a real server.

    late_*         seconds from the intended time of a request to the time at which the client sent it
    failures       what went wrong, by request id, of requests that have no record
    other_lengths  answers of other lengths than the workload's
    """

    seed: int
    rate_rps: float | None
    requests: int
    makespan_s: float
    late_mean_s: float
    late_max_s: float
    failures: dict[str, str]
    other_lengths: int


@dataclass(frozen=True, slots=True)
class RunRow:
    """One finished run: one arm under one seed and one load. Bytes are those the cache holds, weighted by time; of
    several replicas all numbers are sums, and the peaks those of the sum."""

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
    # of one group of requests: prompt length, match length and every checkpoint position held, per visit
    group_rounds: list[dict[str, int | list[int]]] = field(default_factory=list)
    # steps, by feature, that had more or less of it than the timing model was fitted to
    beyond: dict[str, int] = field(default_factory=dict)
    # seconds of fully batched steps that the offered work needs; None where no timing model tells
    demand_s: float | None = None
    replicas: list[ReplicaRow] = field(default_factory=list)  # where there are several
