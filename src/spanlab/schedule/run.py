"""The entry `schedule`: decisions of our scheduler for given requests, one step per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from spanlab.checks import one_of
from spanlab.core.async_scheduler import make_scheduler
from spanlab.core.backend import finished_prompts
from spanlab.core.batch_rules import BatchRules
from spanlab.core.ledger import NoLedger
from spanlab.core.policies.block_pool import BlockPool
from spanlab.core.policies.block_rules import BlockRules, StateMode
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.protocol import Policy
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.speculation import Speculation
from spanlab.schedule.cases import Case, accepted, read_cases
from spanlab.settings import Schedule
from spanlab.typed_json import shown


def vllm_0_32(case: Case) -> BlockPolicy:
    """The policy of vLLM 0.32.0: one pool of hashed blocks, one of which is the null block."""
    states: StateMode = "align" if case.mamba_mode else "none"
    rules = BlockRules(
        case.block_size,
        states,
        case.state_groups,
        case.retention,
        ahead=case.async_scheduling,
        drops_last=case.draft_method == "eagle",
    )
    store = BlockStore(BlockPool(case.num_blocks - 1), 1, 1)
    return BlockPolicy(rules, store, ledger=NoLedger())  # decisions are compared, not causes


PRESETS: dict[str, Callable[[Case], BlockPolicy]] = {"vllm_0_32": vllm_0_32}


@dataclass(slots=True)
class Decisions:
    """Decisions of a case: tokens by step and request, and tokens reused at the first admission, None without one.

    A run of empty steps is one entry of `steps`, `{"empty": number of steps}`; `num_steps` counts each of them.
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


def run_schedule(settings: Schedule) -> None:
    """Read the cases, schedule each, and write the decisions."""
    cases = checked_cases(settings)
    decided = {name: schedule(case, PRESETS[settings.preset](case)) for name, case in cases.items()}
    Path(settings.out).write_bytes(orjson.dumps(decided))
    print(f"{len(decided)} cases, {sum(case.num_steps for case in decided.values()):,} steps: {settings.out}")


def checked_cases(settings: Schedule) -> dict[str, Case]:
    """Return the cases; ValueError for an unknown preset, an unreadable file, or a request that exceeds the memory."""
    one_of("preset", settings.preset, PRESETS)
    cases = read_cases(Path(settings.cases))
    for name, case in cases.items():
        try:
            _check_fits(case, PRESETS[settings.preset](case))
        except ValueError as error:
            raise ValueError(f"cases={settings.cases}: {shown(name)}.{error}") from error
    return cases


def schedule(case: Case, policy: Policy) -> Decisions:
    """Run one case: one step per second, empty or not, until all requests have ended."""
    _check_fits(case, policy)
    rules = BatchRules(
        case.max_num_batched_tokens,
        case.max_num_seqs,
        enable_chunked_prefill=case.enable_chunked_prefill,
        long_prefill_token_threshold=case.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=case.long_prefill_token_threshold_adaptive,
        async_scheduling=case.async_scheduling,
        speculation=Speculation(case.draft_tokens, method=case.draft_method),
    )
    scheduler, decisions = make_scheduler(policy, rules), Decisions([None] * len(case.requests))
    waiting = deque(sorted(case.requests, key=lambda request: (request.arrived_at, request.id)))
    aborts = deque(case.aborts)
    ended_sequences: list[Sequence] = []
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
        decisions.add({} if step is None else _tokens(step))
        if step is None:
            if waiting and scheduler.idle:  # nothing can happen before the next request
                decisions.add({}, waiting[0].arrived_at - decisions.num_steps)
        else:
            accepted_drafts = [_accepted(sequence, drafts) for sequence, drafts in _drafts(step)]
            ended = _ended(step, accepted_drafts)
            scheduler.complete(step, now + 1, ended, accepted_drafts)
            ended_sequences += ended
    _record_outcomes(decisions, ended_sequences)
    return decisions


def _tokens(step: ScheduledStep) -> dict[str, int]:
    tokens = {str(chunk.sequence.request.id): chunk.tokens for chunk in step.chunks}
    return tokens | {str(sequence.request.id): 1 + drafts for sequence, drafts in _drafts(step)}


def _drafts(step: ScheduledStep) -> Iterator[tuple[Sequence, int]]:
    return zip(step.decodes, step.drafts or [0] * len(step.decodes), strict=True)


def _accepted(sequence: Sequence, drafts: int) -> int:
    """Number of accepted drafts of a sequence, at most the rest of its output."""
    remaining = sequence.request.output_len - sequence.generated - 1
    return min(accepted(sequence.request.id, sequence.generated, drafts), remaining)


def _ended(step: ScheduledStep, accepted_drafts: list[int]) -> list[Sequence]:
    decoded = zip(step.decodes, accepted_drafts, strict=True)
    finished = [s for s, drafts in decoded if s.generated + 1 + drafts >= s.request.output_len]
    return finished_prompts(step) + finished


def _record_outcomes(decisions: Decisions, ended: list[Sequence]) -> None:
    for sequence in ended:
        if sequence.first_plan is not None:
            decisions.reused_on_admission[sequence.request.id] = sequence.first_plan.resume
        decisions.preemptions += sequence.preemptions


def _check_fits(case: Case, policy: Policy) -> None:
    for request in case.requests:
        need = policy.need(request)
        blocks = need.kv_bytes + need.state_bytes  # a block counts as one byte here
        if blocks > case.num_blocks:
            reason = f"for request {request.id} of {request.num_tokens} tokens alone"
            raise ValueError(f"num_blocks={case.num_blocks}: expected at least {blocks}, {reason}")
