"""Steps of a running vLLM scheduler, read from the log of its hook, and the same steps decided by
ours.

The log says when each request was added, what each step computed, which tokens came out, and what
was aborted. That is a case of the entry `schedule` whose arrivals are measured: our scheduler gets
every request before the step before which the server's got it. Equality is then decidable, however
the clients' timing came out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from spanlab.core.policies.block_pool import GroupKind
from spanlab.core.step import ScheduledSequence, ScheduledStep, StepFeatures, features
from spanlab.schedule import PRESETS, Case, check_fits, schedule
from spanlab.typed_json import first_mistake

# ------------------------------------------------------------------------------
# The log: one JSON object per line. Times are nanoseconds of one monotonic clock.
# ------------------------------------------------------------------------------

TokensById = dict[str, int]
# vLLM's id of a request that the client has numbered
_CLIENT_ID = re.compile(r"-(\d+)-0(?:-[0-9a-f]+)?$")


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    at: int


#: Kinds of groups by the name of vLLM's specification of their cache.
_GROUP_KINDS: dict[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
}


class Group(BaseModel):
    """Layers that share a cache: the kind of their specification, tokens and bytes per block,
    number of layers.

    `span`  tokens of a window or a chunk; 0 in logs of earlier hooks, whose servers have neither
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    kind: str
    block_size: int
    page_bytes: int
    layers: int
    span: int = 0


class Start(_Event):
    """The scheduler was made: its limits, and the layout of its cache. `num_blocks` counts the null
    block.

    `cuda_graphs`  whether steps of few tokens run as captured graphs; None in logs of earlier hooks
    """

    event: Literal["start"]
    version: str
    num_blocks: int
    block_size: int
    groups: list[Group]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    policy: Literal["fcfs", "priority"]
    async_scheduling: bool
    prefix_caching: bool
    mamba_mode: str
    retention: int | None
    draft_method: str | None
    draft_tokens: int
    cuda_graphs: bool | None = None


class Add(_Event):
    """A request joined the queue."""

    event: Literal["add"]
    id: str
    tokens: list[int]
    output_len: int
    priority: int
    salt: str | None


class Plan(_Event):
    """A step was planned: tokens by request, reused tokens of those that started, and drafts to
    verify.

    `chunk_block_size`  tokens of the blocks at whose ends the prompts of hybrids are cut; None in
                        logs of earlier hooks
    """

    event: Literal["plan"]
    began: int
    chunk_block_size: int | None = None
    tokens: TokensById
    reused: TokensById
    resumed: TokensById
    preempted: list[str]
    drafts: TokensById


class Done(_Event):
    """The outputs of the oldest planned step arrived."""

    event: Literal["done"]
    began: int
    tokens: dict[str, list[int]]


class Abort(_Event):
    """Requests were aborted."""

    event: Literal["abort"]
    ids: list[str]


class Reset(_Event):
    """The cache was emptied, or could not be."""

    event: Literal["reset"]
    done: bool


Event = Annotated[Start | Add | Plan | Done | Abort | Reset, Field(discriminator="event")]
_EVENTS: TypeAdapter[Any] = TypeAdapter(Event)


def read_events(path: Path) -> list[Any]:
    """Return the events of a log; ValueError names the line of the first invalid one.

    A last line without its end is that of a server that was killed; it is left out.
    """
    lines, events = path.read_bytes().split(b"\n")[:-1], []
    for number, line in enumerate(lines, 1):
        try:
            events.append(_EVENTS.validate_json(line, strict=True))
        except ValidationError as error:
            raise ValueError(f"{path}:{number}: {first_mistake(error)}") from error
    return events


def write_last_run(log: Path, path: Path) -> None:
    """Copy the last run of a server's log: its last start, and what followed the last time its
    cache was emptied.

    ValueError where the cache could not be emptied, or where the log does not say so.
    """
    lines = log.read_bytes().split(b"\n")[:-1]
    starts, resets = (
        [n for n, line in enumerate(lines) if line.startswith(_MARK % name)]
        for name in (b"start", b"reset")
    )
    if not starts or not resets or not orjson.loads(lines[resets[-1]])["done"]:
        raise ValueError(f"{log}: expected a server whose cache was emptied before the run")
    path.write_bytes(b"\n".join([lines[starts[-1]], *lines[resets[-1] + 1 :], b""]))


_MARK = b'{"event": "%s"'


def read_run(path: Path) -> LiveRun:
    """Read a file of `write_last_run`; ValueError for another one."""
    events = read_events(path)
    if not events or not isinstance(events[0], Start):
        raise ValueError(
            f"{path}: expected the start of a scheduler first, as the hook of a server writes it"
        )
    try:
        return LiveRun(events[0], events[1:])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path}: {error}; expected one run of one server, from an empty cache"
        ) from error


# ------------------------------------------------------------------------------
# A run of the server as a case.
# ------------------------------------------------------------------------------


class ServedStep(NamedTuple):
    """A step of the server: tokens by request, when its planning began, and when its outputs
    arrived."""

    tokens: dict[str, int]
    began: int
    ended: int


@dataclass
class Served:
    """What the server did with one request; steps are counted from 0, times are nanoseconds of the
    log's clock.

    `reused`      tokens that its first start reused; None: it never started
    `started`     the step that started it
    `first`       the step that made its first token
    """

    id: str
    tokens: list[int]
    output_len: int
    priority: int
    salt: str | None
    arrive_step: int
    added_at: int
    output: list[int] = field(default_factory=list)
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    reused: int | None = None
    started: int | None = None
    first: int | None = None
    last: int | None = None
    preemptions: int = 0
    abort_step: int | None = None

    @property
    def number(self) -> int:
        """The number that the client gave the request; ValueError where it gave none."""
        match = _CLIENT_ID.search(self.id)
        if match is None:
            raise ValueError(
                f"steps of a server: request id {self.id}: expected the number that the client sent"
            )
        return int(match[1])


class LiveRun:
    """One run of a server from an empty cache.

    `start`   what its scheduler was made with
    `events`  what followed
    """

    def __init__(self, start: Start, events: Sequence[Any]) -> None:
        self.start = start
        self.requests: list[Served] = []
        self.steps: list[ServedStep] = []
        self.chunk_block_sizes = set[int]()
        self._by_id: dict[str, Served] = {}
        # steps whose outputs are outstanding; empty plans are not counted
        self._planned: list[tuple[int, Plan]] = []
        for event in events:
            getattr(self, f"_{type(event).__name__.lower()}")(event)
        # plans that only tell the workers what has ended
        while self.steps and not self.steps[-1].tokens:
            self.steps.pop()
        for served in self.requests:
            if served.last is None and served.abort_step is None:  # the server ended before it
                served.abort_step = len(self.steps)

    def _add(self, event: Add) -> None:
        served = Served(
            event.id,
            event.tokens,
            event.output_len,
            event.priority,
            event.salt,
            len(self.steps),
            event.at,
        )
        self.requests.append(served)
        self._by_id[event.id] = served

    def _plan(self, event: Plan) -> None:
        number = len(self.steps)
        if event.chunk_block_size is not None:
            self.chunk_block_sizes.add(event.chunk_block_size)
        for request, reused in event.reused.items():
            self._by_id[request].reused, self._by_id[request].started = reused, number
        for request in event.preempted:
            self._by_id[request].preemptions += 1
        # a plan that only waits for the step under way is no step
        if event.tokens or not self._planned:
            self.steps.append(ServedStep(event.tokens, event.began, event.at))
            if event.tokens:
                self._planned.append((number, event))

    def _done(self, event: Done) -> None:
        if not self._planned:  # the outputs of an empty plan
            return
        number, plan = self._planned.pop(0)
        self.steps[number] = self.steps[number]._replace(ended=event.at)
        for request, tokens in event.tokens.items():
            served = self._by_id[request]
            if served.first is None:
                served.first = number
            if request in plan.drafts:
                served.drafts[str(len(served.output))] = plan.drafts[request], len(tokens) - 1
            served.output += tokens[: served.output_len - len(served.output)]
            if len(served.output) == served.output_len:
                served.last = number

    def _abort(self, event: Abort) -> None:
        for request in event.ids:
            served = self._by_id[request]
            if served.last is None:
                served.abort_step = len(self.steps)

    def _reset(self, event: Reset) -> None:
        """Emptied caches begin a run; one within a run is no part of a case."""
        raise ValueError(
            "the cache was emptied while a run was served: expected one run, from a reset to the next"
        )

    def _start(self, event: Start) -> None:
        raise ValueError(
            "the server started again while a run was served: expected one run of one server"
        )

    @cached_property
    def case(self) -> Case:
        """The run as a case; ValueError for a server that does what cases cannot say."""
        start = self.start
        content: dict[str, Any] = {
            "block_size": start.block_size,
            "num_blocks": start.num_blocks,
            "max_num_seqs": start.max_num_seqs,
            "max_num_batched_tokens": start.max_num_batched_tokens,
            "enable_chunked_prefill": start.enable_chunked_prefill,
            "long_prefill_token_threshold": start.long_prefill_token_threshold,
            "policy": start.policy,
            "async_scheduling": start.async_scheduling,
            **_groups(start),
        }
        if start.draft_tokens:
            content |= {"draft_tokens": start.draft_tokens, "draft_method": start.draft_method}
        content["requests"] = [
            {
                "tokens": served.tokens,
                "output_len": served.output_len,
                "arrive_step": served.arrive_step,
                "priority": served.priority,
                "abort_step": served.abort_step,
                "cache_salt": served.salt,
                # An aborted request has no end of its output; the case aborts it before that.
                "output": served.output + [0] * (served.output_len - len(served.output)),
                "drafts": served.drafts if start.draft_tokens else None,
            }
            for served in self.requests
        ]
        return Case.model_validate(content)


def _groups(start: Start) -> dict[str, Any]:
    """Return the keys of a case for the groups of layers."""
    if not start.prefix_caching:
        raise ValueError("the server has no prefix cache: expected enable_prefix_caching")
    if unknown := {group.kind for group in start.groups} - set(_GROUP_KINDS):
        expected = ", ".join(_GROUP_KINDS)
        raise ValueError(
            f"the server has groups of {', '.join(sorted(unknown))}: expected {expected}"
        )
    groups = [
        {"kind": _GROUP_KINDS[group.kind], "block_size": group.block_size, "span": group.span}
        for group in start.groups
    ]
    states = sum(group["kind"] == "state" for group in groups)
    mode = start.mamba_mode if states else None
    return {
        "groups": groups,
        "mamba_mode": mode,
        "state_groups": states,
        "retention": start.retention,
    }


# ------------------------------------------------------------------------------
# Our scheduler on the same case.
# ------------------------------------------------------------------------------


class Decided(NamedTuple):
    """Our decisions about one request; steps as in `Served`."""

    reused: int | None
    started: int
    first: int
    last: int
    preemptions: int


class Difference(NamedTuple):
    """A step in which the two schedulers computed different tokens; `None` stands for a step that
    did not occur."""

    step: int
    served: dict[str, int] | None
    decided: dict[str, int] | None


@dataclass(frozen=True)
class Rendezvous:
    """A run of a server beside our decisions on it.

    `decided`      by number of the request
    `differences`  steps that differ, in order; those after the first may follow from it
    `work`         by number of the step, what our scheduler computes in it
    """

    run: LiveRun
    decided: Mapping[int, Decided]
    num_steps: int
    differences: tuple[Difference, ...]
    work: Mapping[int, StepFeatures]

    def same_reuse(self, number: int) -> bool:
        """Whether both reused the same number of a request's tokens."""
        served, ours = self.run.requests[number], self.decided.get(number)
        return served.reused == (None if ours is None else ours.reused)

    def same_course(self, number: int) -> bool:
        """Whether a request started, made its first token and ended in the same steps, as often
        preempted."""
        served, ours = self.run.requests[number], self.decided.get(number)
        if served.last is None:  # aborted: its steps are compared, its end is not ours to decide
            return True
        course = served.started, served.first, served.last, served.preemptions
        return ours is not None and course == (
            ours.started,
            ours.first,
            ours.last,
            ours.preemptions,
        )


def meet(run: LiveRun, preset: str, state_bytes: int = 0) -> Rendezvous:
    """Decide a server's run again; ValueError for a run that the preset cannot decide.

    `state_bytes`  of a recurrent state, for the work of the steps
    """
    case = run.case
    policy = PRESETS[preset](case)
    check_fits(case, policy)
    decided: dict[int, Decided] = {}
    work: dict[int, StepFeatures] = {}

    def computes(number: int, step: ScheduledStep) -> None:
        work[number] = features(step, state_bytes)

    def ended(sequence: ScheduledSequence) -> None:
        reused = None if sequence.first_plan is None else sequence.first_plan.resume
        times = (sequence.admitted_at, sequence.first_token_at - 1, sequence.finished_at - 1)
        decided[sequence.request.id] = Decided(reused, *times, sequence.preemptions)

    ours: list[dict[str, int]] = []
    for decided_step in schedule(case, policy, ended, computes).steps:
        if "empty" in decided_step:  # a run of empty steps is one entry
            ours += ({} for _ in range(decided_step["empty"]))
        else:
            ours.append(decided_step)
    numbers = {served.id: str(number) for number, served in enumerate(run.requests)}
    theirs = [{numbers[name]: count for name, count in step.tokens.items()} for step in run.steps]
    longest = max(len(ours), len(theirs))
    pairs = ((_at(theirs, step), _at(ours, step)) for step in range(longest))
    differences = tuple(
        Difference(step, *pair) for step, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    return Rendezvous(run, decided, longest, differences, work)


def other_release(run: LiveRun, preset: str) -> tuple[str, ...]:
    """Return one sentence if the server is of another release of vLLM than the preset, else
    none."""
    release = preset.removeprefix("vllm_").replace("_", ".")
    if run.start.version.startswith(f"{release}."):
        return ()
    return (
        f"the server is vLLM {run.start.version}, decided as {preset}: expected the preset of its release",
    )


def _at(steps: Sequence[dict[str, int]], number: int) -> dict[str, int] | None:
    return steps[number] if number < len(steps) else None


# ------------------------------------------------------------------------------
# Known faults of servers, and runs as files that can be sent.
# ------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault of a server that explains differences: whether a server has it, and one sentence."""

    applies: Callable[[LiveRun], bool]
    sentence: str


#: Known faults by the name that `analyses.rendezvous.accept` takes.
FAULTS = {
    "block_size": Fault(
        lambda run: (
            run.start.mamba_mode == "align" and bool(run.chunk_block_sizes - {run.start.block_size})
        ),
        "a fault of vLLM 0.32.0: its worker raises the block size of a hybrid, and its scheduler goes on cutting "
        "prompts at the smaller one, so that states are stored where no request looks for them; with --block-size "
        "(here pool.block_size) set to the raised size both agree",
    )
}


def write_case(run: LiveRun, path: Path) -> None:
    """Write a run as a file of cases, which the entry `schedule` reads."""
    case = run.case.model_dump(by_alias=True, exclude_defaults=True)
    path.write_bytes(orjson.dumps({path.stem: case}))
