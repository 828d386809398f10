"""The real backend: executes the scheduler's step plans on a model and a paged pool."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns, perf_counter

import numpy as np
import torch
from torch import Tensor

from spanlab.core.backend import StepResult, finished_after
from spanlab.core.passes import is_repair, of_span, passes
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.scheduler import ScheduledChunk, ScheduledStep, Sequence
from spanlab.core.spans import SpanSettings
from spanlab.engine.agreement import check_memory, check_parts
from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.copies import Copier
from spanlab.engine.forced import known_steps
from spanlab.engine.hook import Attend, Keep, Project, Recur
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.measured_repair import MeasuredRepair
from spanlab.engine.memory import Memory
from spanlab.engine.model import SpanModel
from spanlab.engine.node_pages import NodePages
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows, cache_span_rows, chunk_rows
from spanlab.engine.recurrent import Recurrence
from spanlab.engine.request_state import RequestState
from spanlab.engine.running_state import RunningState, StateRows
from spanlab.engine.sampling import Draw, Sampler
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.angles import angle_table

OnLogits = Callable[[Sequence, Tensor], None]


#: Seconds of one step by what they went to, each forward as a whole to the first below `copy_s` that it serves.
PHASES = (
    "plan_s",  # since the step before: storing, records, scheduling
    "copy_s",  # no forward: copies of spans, rotated or not, copy-on-write, states loaded, stored maps composed
    "repair_s",
    "prefill_s",  # ordered text
    "fill_s",  # spans
    "decode_s",
)


class Engine:
    """One model, its pools and one policy: the real backend. A step lasts as long as it took, host work included.

    `states`     where a model with recurrent layers keeps theirs
    `maps`       where it keeps the maps of spans, if the policy's rules have any
    `positions`  the largest prompt and output together that will be asked for
    `outputs`    tokens generated so far, by request id
    `at_once`    whether the known rest of an answer is computed in one step, where no arrival is due meanwhile
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
        states: StatePool | None = None,
        maps: SpanMaps | None = None,
        at_once: bool = False,
        counter: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.model, self.pool, self.policy, self.key_layout = model, pool, policy, key_layout
        self.memory = None if states is None else Memory(states, maps)
        check_parts(model, pool, policy, key_layout)
        check_memory(model, policy, states, maps)
        tree = policy.store.tree
        self.nodes = NodePages(tree.block_size, pool.give)
        tree.watchers.append(self.nodes)
        if self.memory is not None:
            policy.store.on_drop = self.memory.drop
        self.outputs: dict[int, list[int]] = {}
        self._sampler, self._on_logits = sampler or Sampler(), on_logits
        self._table = angle_table(model.rotation.frequencies, positions + 1, model.device)
        self._copier = Copier(pool, self._table, key_layout, model.rotation.interleaved)
        rule = policy.rules.repair
        self._measured = MeasuredRepair(rule, model.layers, key_layout, pool, self._attention, self._without_logits)
        self._request_states: dict[Sequence, RequestState] = {}
        self.steps = 0
        self._at_once = at_once
        self._counter, self._since = counter, counter()

    def resume(self) -> None:
        """Count the next step's time from here."""
        self._since = self._counter()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Compute everything that a step plans, once; what it takes counts from the end of the step before it."""
        began, times = self._counter(), known_steps(step) if self._at_once and deadline_ns is None else 1
        phases = self.run(step, times)
        before, self._since = self._since, self._counter()
        phases["plan_s"] = (began - before) * 1e-9
        return StepResult(self._since - before, finished_after(step, times), times, phases)

    def run(self, step: ScheduledStep, times: int = 1) -> dict[str, float]:
        """Compute what a step plans, `times` tokens of each that decodes; returns the seconds of its phases."""
        self._clear()
        self._claim(step)
        repair = self.policy.rules.repair
        across = self.key_layout.copies or repair.kind != "none"
        seconds = dict.fromkeys(PHASES, 0.0)
        for at, chunks in enumerate(passes(step, across, repair.measured)):
            seconds["copy_s"] += self._timed(self._copy, chunks)
            seconds[_kind(chunks)] += self._timed(self._forward, chunks, step.decodes if at == 0 else [], times)
        self.steps += 1
        return seconds

    def completed(self, step: ScheduledStep) -> None:
        """Follow what the policy stored of a step; to be called right after the scheduler's commit."""
        for chunk in step.chunks:
            request_state = self._request_states[chunk.sequence]
            for index in chunk.work.cache_spans:
                request_state.adopt(index)
            if chunk.last:
                request_state.adopt_links()
        for sequence in step.decodes:
            if sequence.allocation is None:  # it has ended, and its output may be stored
                self._request_states[sequence].adopt(len(self._request_states[sequence].spans) - 1)

    def close(self) -> None:
        """Give back what ended requests still hold; what is stored stays."""
        self._clear()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Take back the pages of those who have ended or were preempted since the last step."""
        for sequence, request_state in list(self._request_states.items()):
            if sequence.allocation is not request_state.allocation:
                request_state.leave()
                del self._request_states[sequence]

    def _claim(self, step: ScheduledStep) -> None:
        """Give pages to what the policy stored while it planned this step, in the order in which it did."""
        if not self.policy.stores_when_scheduled:
            return
        for chunk in step.chunks:
            for index in chunk.work.cache_spans:
                self._request_state(chunk.sequence).claim(index)

    def _request_state(self, sequence: Sequence) -> RequestState:
        if sequence not in self._request_states:
            allocation = sequence.allocation
            assert allocation is not None, "only who is admitted is seated"
            state = None if self.memory is None else self.memory.begin(allocation)
            self._request_states[sequence] = RequestState(
                sequence, allocation, self.pool, self.nodes, self.key_layout, state
            )
        return self._request_states[sequence]

    def _copy(self, chunks: list[ScheduledChunk]) -> None:
        for chunk in chunks:
            request_state = self._request_state(chunk.sequence)
            begins = chunk.start == chunk.work.start and not self.policy.rules.repair.measured
            self._copier.before(request_state, chunk, self._repaired(chunk) if begins else None)
        if self.memory is not None:
            for sequence, chunk in {chunk.sequence: chunk for chunk in reversed(chunks)}.items():
                self.memory.load(self._state(sequence), chunk.work.cache_span)

    def _state(self, sequence: Sequence) -> RunningState:
        state = self._request_states[sequence].state
        assert state is not None, "a request of a hybrid model has a state"
        return state

    def _repaired(self, chunk: ScheduledChunk) -> np.ndarray | None:
        """Prompt positions that a repair computes again, all of them, where no row leaves on its way."""
        if not is_repair(chunk):
            return None
        return self._request_states[chunk.sequence].repaired_by(self.policy.rules.repair)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int) -> None:
        rule = self.policy.rules.repair
        if rule.measured and chunks and is_repair(chunks[0]):
            self._repair(chunks[0], rule.probes)
        else:
            self._plain(chunks, decodes, times)

    def _repair(self, chunk: ScheduledChunk, probes: bool) -> None:
        """A measured repair: a probe only says which tokens it computes, and so where it writes."""
        request_state = self._request_state(chunk.sequence)
        if not probes:
            self._measured.blend(request_state, chunk)
            return
        request_state.repaired = self._measured.probe(request_state, chunk)
        self._copier.before(request_state, chunk, request_state.repaired)
        self._plain([chunk], [], times=0)

    def _plain(self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int) -> None:
        rows = [chunk_rows(self._request_state(c.sequence), c, self.key_layout, self._repaired(c)) for c in chunks]
        rows += [self._decode_rows(sequence, times) for sequence in decodes]
        sequences = [*(chunk.sequence for chunk in chunks), *decodes]
        asked = [*(int(chunk.last) for chunk in chunks), *(times for _ in decodes)]
        ends = np.cumsum([len(part.indices) for part in rows])
        last = [np.arange(end - count, end) for end, count in zip(ends.tolist(), asked, strict=True)]
        slots = self._tensor(np.concatenate([part.slots for part in rows]))
        attention = self._attention(*rows)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.pool.write(layer, slots, key, value)
            return attention.attend(layer, query)

        recurrence = self._recurrence(chunks, decodes, times)
        recur = None if recurrence is None else recurrence.run
        logits = self._logits(sequences, rows, attend, np.concatenate(last), recur=recur)
        if recurrence is not None:
            recurrence.done()
        due = [(one, one.generated + at) for one, count in zip(sequences, asked, strict=True) for at in range(count)]
        self._choose(due, logits)

    def _recurrence(self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int) -> Recurrence | None:
        """What the recurrent layers do with the rows of chunks and decodes; None where there are none."""
        if self.memory is None:
            return None
        rows = [StateRows(chunk.work.cache_span, chunk.start, chunk.stop, chunk.captures) for chunk in chunks]
        rows += [self._decoded(sequence, times) for sequence in decodes]
        states = [self._state(sequence) for sequence in [*(chunk.sequence for chunk in chunks), *decodes]]
        return self.memory.recurrence(zip(states, rows, strict=True), self.model.device)

    def _decoded(self, sequence: Sequence, times: int) -> StateRows:
        place = sequence.prompt + sequence.generated - 1
        return StateRows(len(self._request_states[sequence].spans) - 1, place, place + times, ())

    def _decode_rows(self, sequence: Sequence, times: int) -> QueryRows:
        cache_span, start, stop, _ = self._decoded(sequence, times)
        return cache_span_rows(self._request_states[sequence], cache_span, start, stop, self.key_layout)

    def _without_logits(
        self, of: Sequence, rows: QueryRows, attend: Attend, keep: Keep | None = None, project: Project | None = None
    ) -> None:
        self._logits([of], [rows], attend, np.empty(0, np.int64), keep=keep, project=project)

    def _attention(self, *rows: QueryRows) -> AttentionMetadata:
        return AttentionMetadata(rows, self.model, self.pool, self._table, self.key_layout)

    def _logits(
        self,
        sequences: list[Sequence],
        rows: list[QueryRows],
        attend: Attend,
        asked: np.ndarray,
        keep: Keep | None = None,
        recur: Recur | None = None,
        project: Project | None = None,
    ) -> Tensor:
        for part in rows:
            self._copier.note(part.slots, part.rotations)
        ids = np.concatenate([self._ids(s, part.indices) for s, part in zip(sequences, rows, strict=True)])
        rotations = np.concatenate([part.rotations for part in rows])
        tensors = self._tensor(ids), self._tensor(rotations)
        return self.model.forward(*tensors, attend, self._tensor(asked), keep, recur, project, step=self.steps)

    def _ids(self, sequence: Sequence, indices: np.ndarray) -> np.ndarray:
        tokens, prompt = self._request_states[sequence].tokens, sequence.prompt
        if not len(indices) or indices[-1] < prompt:
            return tokens[indices]
        known = sequence.request.output
        said = self.outputs[sequence.request.id] if known is None else known
        return np.concatenate([tokens, np.array(said, np.int64)])[indices]

    def _choose(self, due: list[tuple[Sequence, int]], logits: Tensor) -> None:
        """Choose tokens, by request and index in its output, from their rows of logits."""
        draws = [Draw(sequence.request.id, at) for sequence, at in due]
        for (sequence, at), row, token in zip(due, logits, self._sampler.choose(logits, draws), strict=True):
            if self._on_logits is not None:
                self._on_logits(sequence, row)
            output = self.outputs.setdefault(sequence.request.id, [])
            known = sequence.request.output
            token = token if known is None else int(known[at])  # teacher forcing
            output[at:] = [token]  # a request of the same id may have been served before

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.model.device)

    def _timed(self, work: Callable[..., None], *given: object) -> float:
        began = perf_counter()
        work(*given)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return perf_counter() - began


def _kind(chunks: list[ScheduledChunk]) -> str:
    if not chunks:
        return "decode_s"
    if any(is_repair(chunk) for chunk in chunks):
        return "repair_s"
    return "fill_s" if all(of_span(chunk) for chunk in chunks) else "prefill_s"
