"""The entry `schedule`: stored cases of vLLM's scheduler, run by ours."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.ahead import make_scheduler
from spanlab.core.ledger import NoLedger
from spanlab.core.policies.block_pool import (
    BlockPool,
    BlockRules,
    BlockStore,
    GroupKind,
    GroupRule,
    StateMode,
    alignment_of,
    block_of,
    check_layout,
)
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.protocol import Policy
from spanlab.core.releases import RELEASES, Release
from spanlab.core.request import Request, Span
from spanlab.core.step import ScheduledSequence, ScheduledStep, finished_prompts
from spanlab.typed_json import first_mistake, shown

# ------------------------------------------------------------------------------
# Cases of a schedule comparison: requests as token ids, the sizes of a cache, and their checks.
#
# The format is the one that a driver of vLLM's scheduler reads: a JSON object of cases by name,
# each with the keys of
# `Case`. Some go together only with others, as vLLM 0.32.0 has it.
# ------------------------------------------------------------------------------

FIRST_OUTPUT_ID, OUTPUT_IDS = 7, 13
_LARGEST = 2**31 - 1
_LAST_STEP = 2**53 - 1  # whole numbers up to it are exact in every reader of JSON
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Size = Annotated[int, Field(ge=1, le=_LARGEST)]
Few = Annotated[int, Field(ge=0, le=1024)]
Step = Annotated[int, Field(ge=0, le=_LAST_STEP)]


class Abort(NamedTuple):
    """The step before which a request is aborted, and the request's number."""

    step: int
    request: int


class Drafts(NamedTuple):
    """Drafts of one step: how many the drafter proposed, and how many of them held."""

    proposed: int
    accepted: int


NO_DRAFTS = Drafts(0, 0)


class _Keys(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, content: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for key in content if isinstance(content, dict) else ():
            if key not in known:
                raise ValueError(f"{shown(key)}: no such key; expected {', '.join(sorted(known))}")
        return content


class CaseRequest(_Keys):
    """One request.

    `priority`    smaller is more urgent
    `abort_step`  the step before which it is aborted
    `cache_salt`  requests with different salts share nothing
    `output`      tokens of the output; null: by a fixed formula
    `drafts`      drafts by the number of output tokens before their step; null: `draft_tokens` each
                  time, accepted by a fixed formula
    """

    tokens: Annotated[list[Count], Field(min_length=1)]
    output_len: Annotated[int, Field(ge=1, le=2**20)]
    arrive_step: Step = 0
    priority: Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)] = 0
    abort_step: Step | None = None
    cache_salt: str | None = None
    output: list[Count] | None = None
    drafts: dict[str, Drafts] | None = None

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """The tokens of the output."""
        if self.output is None:
            return FIRST_OUTPUT_ID + np.arange(self.output_len, dtype=np.int32) % OUTPUT_IDS
        return np.array(self.output, np.int32)


class CaseGroup(_Keys):
    """Groups of layers of one kind; `GroupRule` defines the kinds.

    `block_size`  tokens per block; null: that of the case
    `span`        tokens of a window or a chunk
    `count`       equal groups
    """

    kind: GroupKind
    block_size: Size | None = None
    span: Count = 0
    count: Annotated[int, Field(ge=1, le=1024)] = 1


class Case(_Keys):
    """One workload and one cache.

    `num_blocks`    the null block among them
    `state_groups`  groups of recurrent layers
    `retention`     tokens between the states that are kept; 0: one state per request
    `inner_states`  whether the last chunk of a prompt also stores the state at its last block
                    boundary
    `groups`        groups of layers in the order of vLLM's; null: full attention, and
                    `state_groups`
    The keys of a step are those of `batch`; a `long_prefill_token_threshold` of 0 is no limit.
    """

    block_size: Size
    num_blocks: Size
    max_num_seqs: Size
    max_num_batched_tokens: Size
    mamba_mode: Literal[None, "align"] = None
    state_groups: Few = Field(
        default_factory=lambda given: int(given.get("mamba_mode") is not None)
    )
    retention: Count | None = None
    inner_states: bool = False
    draft_tokens: Few = 0
    draft_method: Literal["ngram", "eagle"] = "ngram"
    draft_modules: Annotated[int, Field(ge=1, le=1024)] = 1
    async_scheduling: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    groups: Annotated[list[CaseGroup] | None, Field(min_length=1)] = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Count = 0
    long_prefill_token_threshold_adaptive: bool = False
    given: Annotated[list[CaseRequest], Field(alias="requests", min_length=1)]

    @property
    def layout(self) -> tuple[GroupRule, ...]:
        """The groups of layers, one by one."""
        states = [CaseGroup(kind="state", count=self.state_groups)] if self.state_groups else []
        listed = [
            [GroupRule(group.kind, group.block_size or self.block_size, group.span)] * group.count
            for group in self.groups or (CaseGroup(kind="full"), *states)
        ]
        return tuple(rule for groups in listed for rule in groups)

    @property
    def speculation(self) -> Speculation:
        """How drafts are made."""
        return Speculation(self.draft_tokens, method=self.draft_method, modules=self.draft_modules)

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """The requests; `arrived_at` counts steps."""
        return tuple(
            Request(
                number,
                0,
                (Span(np.array(request.tokens, np.int32)),),
                request.output_len,
                request.arrive_step,
                request.cache_salt or "",
                output=request.output_ids,
                priority=request.priority,
            )
            for number, request in enumerate(self.given)
        )

    @cached_property
    def aborts(self) -> tuple[Abort, ...]:
        """The aborts in order of steps and then of requests."""
        steps = ((request.abort_step, number) for number, request in enumerate(self.given))
        return tuple(sorted(Abort(step, number) for step, number in steps if step is not None))

    def proposed(self, sequence: ScheduledSequence) -> int:
        """Return the number of drafts that the next decode of a sequence may verify."""
        measured = self.given[sequence.request.id].drafts
        return (
            self.draft_tokens
            if measured is None
            else measured.get(str(sequence.generated), NO_DRAFTS).proposed
        )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        mode, drafts, chunked = self.mamba_mode, self.draft_tokens, self.enable_chunked_prefill
        threshold, groups = self.long_prefill_token_threshold, self.state_groups
        layout = self.layout
        try:
            check_layout(layout)
        except ValueError as error:
            raise ValueError(f"groups: {error}") from error
        align, listed = alignment_of(layout), any(rule.kind == "state" for rule in layout)
        # vLLM takes no memory behind its longest request.
        longest = max(len(request.tokens) + request.output_len for request in self.given)
        lookahead = self.speculation.lookahead
        longest += (
            2 * drafts + max(1, lookahead)
            if drafts and self.async_scheduling
            else drafts + lookahead
        )
        reach, read = self.speculation.reach, "which the modules of the drafter read ahead"
        whole = f"at least {longest}, the most tokens of a request and its drafts, with enable_chunked_prefill=false"
        rules = [
            (
                self.max_num_batched_tokens < self.max_num_seqs,
                "max_num_batched_tokens",
                f"at least max_num_seqs={self.max_num_seqs}",
            ),
            (
                bool((mode or self.groups) and (self.retention or 0) % align),
                "retention",
                f"a multiple of {align}, the tokens of a block"
                if self.groups
                else f"a multiple of block_size={align}",
            ),
            (
                self.groups is not None and listed != (mode is not None),
                "mamba_mode",
                "align beside groups of kind=state"
                if listed
                else "null beside groups without kind=state",
            ),
            (
                reach > self.max_num_batched_tokens,
                "max_num_batched_tokens",
                f"at least {reach}, {read}",
            ),
            (0 < threshold < reach, "long_prefill_token_threshold", f"at least {reach}, {read}"),
            (self.block_size < reach, "block_size", f"at least {reach}, {read}"),
            (
                self.draft_modules > 1 and self.draft_method != "eagle",
                "draft_modules",
                "draft_method=eagle beside it",
            ),
            (
                "draft_method" in self.model_fields_set and not drafts,
                "draft_method",
                "draft_tokens beside it",
            ),
            (
                not chunked and mode is not None,
                "enable_chunked_prefill",
                f"true with mamba_mode={mode}, as in vLLM",
            ),
            (
                not chunked and longest > self.max_num_batched_tokens,
                "max_num_batched_tokens",
                f"{whole}, as in vLLM",
            ),
            (
                not chunked and threshold > 0,
                "long_prefill_token_threshold",
                "0, for enable_chunked_prefill=false computes a prompt in one step",
            ),
            (
                self.long_prefill_token_threshold_adaptive and not threshold,
                "long_prefill_token_threshold_adaptive",
                "long_prefill_token_threshold beside it",
            ),
            (mode is not None and not groups, "state_groups", "a whole number of 1 or more"),
            (mode is None and groups > 0, "state_groups", "mamba_mode=align beside it"),
            (mode is None and self.inner_states, "inner_states", "mamba_mode=align beside it"),
        ]
        for is_wrong, key, expected in rules:
            if is_wrong:
                value = getattr(self, key)
                value = (
                    "null"
                    if value is None
                    else str(value).lower()
                    if isinstance(value, bool)
                    else value
                )
                raise ValueError(f"{key}={shown(value)}: expected {expected}")
        for number, request in enumerate(self.given):
            if request.priority and self.policy != "priority":
                raise ValueError(
                    f"requests[{number}].priority={request.priority}: expected policy=priority beside it"
                )
            if request.abort_step is not None and request.abort_step < request.arrive_step:
                raise ValueError(
                    f"requests[{number}].abort_step={request.abort_step}: expected a whole number of "
                    f"{request.arrive_step} or more"
                )
            if request.output is not None and len(request.output) != request.output_len:
                tokens = f"requests[{number}].output of {len(request.output):,} tokens"
                raise ValueError(f"{tokens}: expected output_len={request.output_len}")
        return self


def accepted(request: int, generated: int, drafts: int) -> int:
    """Number of accepted drafts after `generated` output tokens of a request, by a fixed
    formula."""
    return (5 * request + 3 * generated) % (drafts + 1)


def read_cases(path: Path) -> dict[str, Case]:
    """The cases of a JSON file; ValueError is one sentence with the file, the case and the first
    invalid key."""
    try:
        content = json.loads(
            path.read_bytes(), object_pairs_hook=_without_repeats, parse_constant=_no_number
        )
    except OSError as error:
        raise ValueError(f"cases={path}: expected a readable file ({error.strerror})") from error
    except RecursionError as error:
        raise ValueError(f"cases={path}: expected a JSON file of less depth") from error
    except ValueError as error:
        raise ValueError(f"cases={path}: expected a JSON file ({error})") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"cases={path}: expected an object of cases by name")
    try:
        return TypeAdapter(dict[str, Case]).validate_python(content, strict=True)
    except ValidationError as error:
        raise ValueError(f"cases={path}: {first_mistake(error)}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"{shown(next(key for key in keys if keys.count(key) > 1))} occurs twice in one object"
        )
    return by_key


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


# ------------------------------------------------------------------------------
# The entry `schedule`: decisions of our scheduler for given requests, one step per second.
# ------------------------------------------------------------------------------


def policy_of(release: Release, case: Case) -> BlockPolicy:
    """Return the policy of a release of vLLM: one pool of hashed blocks, one of which is the null
    block."""
    states: StateMode = "align" if case.mamba_mode else "none"
    rules = BlockRules(
        block_of(case.layout),
        states,
        case.state_groups,
        case.retention,
        ahead=case.async_scheduling,
        inner_states=case.inner_states,
        drafts=case.draft_tokens,
        drafter=case.speculation.reach,
        release=release,
        groups=case.layout,
        in_flight=case.max_num_batched_tokens * (1 + case.async_scheduling),
    )
    store = BlockStore(BlockPool(case.num_blocks - 1), 1, 1)
    return BlockPolicy(rules, store, ledger=NoLedger())  # decisions are compared, not causes


PRESETS: dict[str, Callable[[Case], BlockPolicy]] = {
    name: partial(policy_of, release) for name, release in RELEASES.items()
}


@dataclass(slots=True)
class Decisions:
    """Decisions of a case: tokens by step and request, and tokens reused at the first admission,
    None without one.

    A run of empty steps is one entry of `steps`, `{"empty": number of steps}`; `num_steps` counts
    each of them.
    """

    reused_on_admission: list[int | None]
    preemptions: int = 0
    num_steps: int = 0
    steps: list[dict[str, int]] = field(default_factory=list)

    def add(self, tokens: dict[str, int], times: int = 1) -> None:
        """Add a step, or `times` empty ones."""
        self.num_steps += times
        if tokens:
            self.steps.append(tokens)
        elif self.steps and "empty" in self.steps[-1]:
            self.steps[-1]["empty"] += times
        else:
            self.steps.append({"empty": times})


def schedule(
    case: Case,
    policy: Policy,
    on_end: Callable[[ScheduledSequence], None] = lambda sequence: None,
    on_step: Callable[[int, ScheduledStep], None] = lambda number, step: None,
) -> Decisions:
    """Run one case: one step per second, empty or not, until all requests have ended.

    `on_end`   is called with the sequence of each request; its times are numbers of steps
    `on_step`  is called with the number of each step that is not empty, and the step before it is
               completed
    """
    check_fits(case, policy)
    rules = BatchRules(
        case.max_num_batched_tokens,
        case.max_num_seqs,
        enable_chunked_prefill=case.enable_chunked_prefill,
        long_prefill_token_threshold=case.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=case.long_prefill_token_threshold_adaptive,
        async_scheduling=case.async_scheduling,
        speculation=case.speculation,
    )
    scheduler = make_scheduler(policy, rules, case.proposed)
    decisions = Decisions([None] * len(case.requests))
    waiting = deque(sorted(case.requests, key=lambda request: (request.arrived_at, request.id)))
    aborts = deque(case.aborts)
    ended_sequences: list[ScheduledSequence] = []
    while waiting or not scheduler.idle:
        now = decisions.num_steps
        while waiting and waiting[0].arrived_at <= now:
            scheduler.add(waiting.popleft())
        scheduler.enqueue_added()  # a case specifies the step from which a request may run, not its arrival time
        while aborts and aborts[0].step <= now:
            aborted = scheduler.abort(case.requests[aborts.popleft().request], now)
            ended_sequences += [aborted] if aborted is not None else []
        if scheduler.idle and not waiting:  # all that remained was aborted
            break
        step = scheduler.schedule(now)
        # all that remained ended with drafts of the step before
        if step is None and scheduler.idle and not waiting:
            break
        decisions.add({} if step is None else _tokens(step))
        if step is None:
            if waiting and scheduler.idle:  # nothing can happen before the next request
                decisions.add({}, waiting[0].arrived_at - decisions.num_steps)
            elif scheduler.waiting and not (waiting or aborts or scheduler.running):
                request = scheduler.waiting[0].request
                raise ValueError(
                    f"num_blocks={case.num_blocks}: expected more, request {request.id} can never start"
                )
            elif scheduler.running and not (waiting or aborts):
                number = scheduler.running[0].request.id
                reason = "its next chunk would end among its last tokens"
                given = f"draft_modules={case.draft_modules}"
                raise ValueError(
                    f"{given}: expected 1, request {number} stops, as in vLLM, for {reason}"
                )
        else:
            on_step(now, step)
            accepted_drafts = [
                _accepted(case, sequence, drafts) for sequence, drafts in _drafts(step)
            ]
            decoded = [
                pair
                for pair in zip(step.decodes, accepted_drafts, strict=True)
                if not pair[0].has_ended
            ]
            ended = finished_prompts(step)
            ended += [
                s for s, drafts in decoded if s.generated + drafts + 1 >= s.request.output_len
            ]
            scheduler.complete(step, now + 1, ended, accepted_drafts)
            ended_sequences += ended
    for sequence in ended_sequences:
        if sequence.first_plan is not None:
            decisions.reused_on_admission[sequence.request.id] = sequence.first_plan.resume
        decisions.preemptions += sequence.preemptions
        on_end(sequence)
    return decisions


def _tokens(step: ScheduledStep) -> dict[str, int]:
    tokens = {str(chunk.sequence.request.id): chunk.tokens for chunk in step.chunks}
    return tokens | {str(sequence.request.id): 1 + drafts for sequence, drafts in _drafts(step)}


def _drafts(step: ScheduledStep) -> Iterator[tuple[ScheduledSequence, int]]:
    return zip(step.decodes, step.drafts or [0] * len(step.decodes), strict=True)


def _accepted(case: Case, sequence: ScheduledSequence, drafts: int) -> int:
    """Number of accepted drafts of a sequence, at most the rest of its output; none of one that has
    ended."""
    if sequence.has_ended:
        return 0
    number, generated = sequence.request.id, sequence.generated
    measured = case.given[number].drafts
    count = (
        accepted(number, generated, drafts)
        if measured is None
        else measured.get(str(generated), NO_DRAFTS).accepted
    )
    return min(count, sequence.request.output_len - generated - 1)


def check_fits(case: Case, policy: Policy) -> None:
    for request in case.requests:
        need = policy.need(request)
        blocks = need.kv_bytes + need.state_bytes  # a block counts as one byte here
        if blocks > case.num_blocks:
            reason = f"for request {request.id} of {request.num_tokens} tokens alone"
            raise ValueError(f"num_blocks={case.num_blocks}: expected at least {blocks}, {reason}")
