"""The real backend: executes scheduled steps on a model and a paged KV pool."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from functools import partial
from time import monotonic_ns

import numpy as np
from torch import Tensor

from spanlab.core.backend import StepResult, finished_after
from spanlab.core.passes import is_repair, passes
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Tokens
from spanlab.core.reuse import TreeAllocation
from spanlab.core.scheduled import ScheduledChunk, ScheduledStep, Sequence
from spanlab.core.spans import SpanSettings
from spanlab.engine.agreement import check_components, check_memory
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.copies import Copier, Move
from spanlab.engine.forwards import Forwards
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.measured_repair import MeasuredRepair
from spanlab.engine.memory import Memory
from spanlab.engine.model import SpanModel
from spanlab.engine.node_pages import NodePages
from spanlab.engine.packer import Packer
from spanlab.engine.page_table import PageTable
from spanlab.engine.phase_clock import PHASES, clock_of, phase_of
from spanlab.engine.pool import PagePool
from spanlab.engine.request_state import RequestState
from spanlab.engine.running_state import state_rows
from spanlab.engine.sampling import Sampler
from spanlab.engine.settings import PLAIN
from spanlab.engine.state_pool import StatePool
from spanlab.engine.step_tokens import OnLogits, StepTokens
from spanlab_kernels.angles import angle_table

OnFinished = Callable[[Sequence, Callable[[Ordered[Tokens]], list[Tensor]]], None]


class Engine:
    """The real backend: one model, its pools and one policy. Step durations are measured and include host work.

    `states`     pool of recurrent states, for a model with recurrent layers
    `maps`       pools of span maps, if the policy's rules use maps
    `positions`  maximum length of prompt and output together
    `outputs`    tokens generated so far, by request id
    `on_finished`  called with each finished sequence and a function that returns logits of alternative answers, see
                 `Forwards.answer_logits`; its time counts for no step
    `at_once`    whether the remaining tokens of known answers are computed in one step while no arrival is due
    `decode`     launch mode of decode-only forwards, see `EngineSettings`
    `counter`    nanoseconds of a monotonic clock
    """

    def __init__(
        self,
        model: SpanModel,
        pool: PagePool,
        policy: TreePolicy,
        key_layout: SpanSettings,
        *,
        positions: int,
        sampler: Sampler | None = None,
        on_logits: OnLogits | None = None,
        on_finished: OnFinished | None = None,
        states: StatePool | None = None,
        maps: SpanMaps | None = None,
        at_once: bool = False,
        decode: str = PLAIN,
        counter: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.model, self.pool, self.policy, self.key_layout = model, pool, policy, key_layout
        self.memory = None if states is None else Memory(states, maps)
        check_components(model, pool, policy, key_layout)
        check_memory(model, policy, states, maps)
        tree = policy.store.tree
        self.nodes = NodePages(tree.block_size, pool.free)
        tree.watchers.append(self.nodes)
        if self.memory is not None:
            policy.store.on_drop = self.memory.drop
        self.outputs: dict[int, list[int]] = {}
        self._tokens = StepTokens(model.name, sampler or Sampler(), self.outputs, on_logits)
        self._on_finished = on_finished
        table = angle_table(model.rotation.frequencies, positions + 1, model.device)
        self._context = context = AttentionContext(model, pool, PageTable(model.device), table, key_layout)
        self._copier = Copier(context)
        self._request_states: dict[Sequence, RequestState] = {}
        packer = Packer(self._request_states, self.outputs, self._copier, model.device)
        self._forwards = Forwards(context, self.memory, packer, self._request_states, decode)
        self._measured = MeasuredRepair(policy.rules.repair, context, packer)
        self.steps = 0
        self._at_once = at_once
        self._counter, self._since = counter, counter()

    def resume(self) -> None:
        """Restart the clock of the next step."""
        self._since = self._counter()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Execute a scheduled step; its duration is measured from the end of the previous step."""
        began, times = self._counter(), self._steps_ahead(step) if self._at_once and deadline_ns is None else 1
        phases = self.run(step, times)
        before, self._since = self._since, self._counter()
        phases["plan_s"] = (began - before) * 1e-9
        result = StepResult(self._since - before, finished_after(step, times), times, phases)
        if self._on_finished is not None:
            for sequence in result.finished:
                self._on_finished(sequence, partial(self._forwards.answer_logits, sequence))
            self.resume()
        return result

    def _steps_ahead(self, step: ScheduledStep) -> int:
        """Number of tokens per answer that one forward computes: all remaining ones if all answers are known.

        It is limited by memory (`max_repeats`, free pages), and 1 for a step with a prompt chunk or an unknown answer.
        The policy reserves memory for the tokens after the first once they are computed.
        """
        if step.chunks or any(sequence.request.output is None for sequence in step.decodes):
            return 1
        remaining = min((sequence.request.output_len - sequence.generated for sequence in step.decodes), default=1)
        times, missing = min(remaining, step.max_repeats), 0
        for sequence in step.decodes if times > 1 else ():
            state = self._request_states[sequence]
            stop = sequence.held_tokens + times - state.spans[-1].cache_span.start
            missing += state.missing(len(state.spans) - 1, stop)
        return times if missing <= self.pool.free_pages else 1

    def run(self, step: ScheduledStep, times: int = 1) -> dict[str, float]:
        """Compute a scheduled step, with `times` tokens per decode; return the seconds of its phases."""
        self._clear()
        self._claim(step)
        repair = self.policy.rules.repair
        across = self.key_layout.copies or repair.kind != "none"
        clock = clock_of(self.model.device)
        for index, chunks in enumerate(passes(step, across, repair.measured)):
            clock.run("copy_s", self._copy, chunks)
            clock.run(phase_of(chunks), self._forward, chunks, step.decodes if index == 0 else [], times)
        self._tokens.read(self.steps)
        self.steps += 1
        return {**dict.fromkeys(PHASES, 0.0), **clock.seconds()}

    def completed(self, step: ScheduledStep) -> None:
        """Register the pages and states that the policy stored; call directly after `Scheduler.complete`."""
        for chunk in step.chunks:
            request_state = self._request_states[chunk.sequence]
            for index in chunk.work.cache_spans:
                request_state.adopt(index)
            if chunk.last:
                request_state.adopt_links()
        for sequence in step.decodes:
            request_state = self._request_states[sequence]
            if sequence.allocation is None:  # finished; its output may be stored
                request_state.adopt(len(request_state.spans) - 1)
            elif request_state.state is not None:  # a state of its output may have been replaced by a newer one
                request_state.state.adopt()

    def close(self) -> None:
        """Free the memory of finished requests; stored blocks stay."""
        self._clear()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Free the pages of requests that finished or were preempted since the last step."""
        for sequence, request_state in list(self._request_states.items()):
            if sequence.allocation is not request_state.allocation:
                request_state.free()
                del self._request_states[sequence]

    def _claim(self, step: ScheduledStep) -> None:
        """Allocate pages for blocks that the policy stored during scheduling, in the same order."""
        if not self.policy.stores_when_scheduled:
            return
        for chunk in step.chunks:
            for index in chunk.work.cache_spans:
                self._request_state(chunk.sequence).claim(index)

    def _request_state(self, sequence: Sequence) -> RequestState:
        if sequence not in self._request_states:
            allocation = sequence.allocation
            assert isinstance(allocation, TreeAllocation), "the engine runs allocations of `tree` only"
            state = None if self.memory is None else self.memory.begin(allocation)
            self._request_states[sequence] = RequestState(sequence, allocation, self._context, self.nodes, state)
        return self._request_states[sequence]

    def _copy(self, chunks: list[ScheduledChunk]) -> None:
        moves: list[Move] = []
        for chunk in chunks:
            request_state = self._request_state(chunk.sequence)
            begins = chunk.start == chunk.work.start and not self.policy.rules.repair.measured
            moves += self._copier.moves_before(request_state, chunk, self._repaired(chunk) if begins else None)
        self._copier.copy(moves)
        if self.memory is not None:
            for sequence, chunk in {chunk.sequence: chunk for chunk in reversed(chunks)}.items():
                self.memory.load(self._request_states[sequence].running, state_rows(chunk)[0])

    def _repaired(self, chunk: ScheduledChunk) -> np.ndarray | None:
        """Prompt positions in a chunk that a repair recomputes, for repairs that do not drop rows between layers."""
        if not is_repair(chunk):
            return None
        chosen = self._request_states[chunk.sequence].repaired_by(self.policy.rules.repair)
        return chosen[(chosen >= chunk.work.start) & (chosen < chunk.work.stop)]

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int) -> None:
        rule = self.policy.rules.repair
        if not (rule.measured and chunks and is_repair(chunks[0])):
            self._compute(chunks, decodes, times)
        elif rule.probes:
            self._probe(chunks[0])
        else:
            self._measured.blend(self._request_state(chunks[0].sequence), chunks[0])

    def _probe(self, chunk: ScheduledChunk) -> None:
        """Run a repair whose tokens are selected by a probe before pages are copied."""
        request_state = self._request_state(chunk.sequence)
        request_state.repaired = chosen = self._measured.probe(request_state, chunk)
        self._copier.copy(self._copier.moves_before(request_state, chunk, chosen))
        self._compute([chunk], [], times=1)

    def _compute(self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int) -> None:
        repaired = [self._repaired(chunk) for chunk in chunks]
        self._tokens.choose(*self._forwards.run(chunks, repaired, decodes, times))
