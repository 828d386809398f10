"""The real backend: executes the scheduler's step plans on a model and a paged pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, perf_counter
from typing import NamedTuple

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
from spanlab.engine.blend import Blend, NothingLeft
from spanlab.engine.copies import Copier
from spanlab.engine.decode_rows import DecodeRows
from spanlab.engine.deviation import DeviationChooser
from spanlab.engine.hook import Attend, Keep, Project, Recur
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.memory import Memory
from spanlab.engine.model import SpanModel
from spanlab.engine.node_pages import NodePages
from spanlab.engine.page_table import PageTable
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows, chunk_rows
from spanlab.engine.reader import Reader
from spanlab.engine.recurrent import Recurrence
from spanlab.engine.request_state import RequestState
from spanlab.engine.running_state import RunningState, StateRows
from spanlab.engine.sampling import Draw, Sampler
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.angles import angle_table
from spanlab_kernels.attention import to_device

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


class PackedRows(NamedTuple):
    """Rows of one forward on the device, int64 [T]: token ids, rotations, slots; and `asked`, rows that need logits."""

    ids: Tensor
    rotations: Tensor
    slots: Tensor
    asked: Tensor


class Engine:
    """One model, its pools and one policy: the real backend. A step lasts as long as it took, host work included.

    `states`     where a model with recurrent layers keeps theirs
    `maps`       where it keeps the maps of spans, if the policy's rules have any
    `positions`  the largest prompt and output together that will be asked for
    `outputs`    tokens generated so far, by request id
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
        counter: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.model, self.pool, self.policy, self.key_layout = model, pool, policy, key_layout
        self.memory = None if states is None else Memory(states, maps)
        check_parts(model, pool, policy, key_layout)
        check_memory(model, policy, states, maps)
        tree = policy.store.tree
        self.nodes = NodePages(tree.block_size, pool.give)
        tree.watcher = self.nodes
        if self.memory is not None:
            policy.store.on_drop = self.memory.drop
        self.outputs: dict[int, list[int]] = {}
        self._sampler, self._on_logits = sampler or Sampler(), on_logits
        self._table = angle_table(model.rotation.frequencies, positions + 1, model.device)
        self._copier = Copier(pool, self._table, key_layout, model.rotation.interleaved)
        self._pages = PageTable(model.device)
        self._reader = Reader(model, pool, self._pages, self._table, key_layout)
        self._request_states: dict[Sequence, RequestState] = {}
        self._decodes: DecodeRows | None = None
        self.steps = 0
        self._counter, self._since = counter, counter()

    def resume(self) -> None:
        """Count the next step's time from here."""
        self._since = self._counter()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Compute everything that a step plans, once; what it takes counts from the end of the step before it."""
        began, phases = self._counter(), self.run(step)
        before, self._since = self._since, self._counter()
        phases["plan_s"] = (began - before) * 1e-9
        return StepResult(self._since - before, finished_after(step), phases=phases)

    def run(self, step: ScheduledStep) -> dict[str, float]:
        """Compute everything that a step plans, and choose the next tokens; returns the seconds of its phases."""
        self._clear()
        self._claim(step)
        repair = self.policy.rules.repair
        across = self.key_layout.copies or repair.kind != "none"
        seconds = dict.fromkeys(PHASES, 0.0)
        for at, chunks in enumerate(passes(step, across, repair.measured)):
            seconds["copy_s"] += self._timed(self._copy, chunks)
            seconds[_kind(chunks)] += self._timed(self._forward, chunks, step.decodes if at == 0 else [])
        self.steps += 1
        return seconds

    def completed(self, step: ScheduledStep) -> None:
        """Follow what the policy stored of a step; to be called right after the scheduler's commit."""
        for chunk in step.chunks:
            request_state = self._request_states[chunk.sequence]
            for index in chunk.work.cache_spans:
                request_state.adopt(index)
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
                sequence, allocation, self.pool, self.nodes, self._pages, self.key_layout, state
            )
        return self._request_states[sequence]

    def _copy(self, chunks: list[ScheduledChunk]) -> None:
        repair = self.policy.rules.repair
        for chunk in chunks:
            request_state = self._request_state(chunk.sequence)
            begins = chunk.start == chunk.work.start and not repair.measured
            self._copier.before(request_state, chunk, self._repaired(chunk) if begins else None)
        if self.memory is not None:
            for sequence, chunk in {chunk.sequence: chunk for chunk in reversed(chunks)}.items():
                self.memory.load(self._state(sequence), chunk.work.cache_span)

    def _state(self, sequence: Sequence) -> RunningState:
        state = self._request_states[sequence].state
        assert state is not None, "a request of a hybrid model has a state"
        return state

    def _repaired(self, chunk: ScheduledChunk) -> np.ndarray | None:
        """Prompt positions that a repair computes again, all of them, where that is known beforehand."""
        if not is_repair(chunk):
            return None
        plan = self._request_states[chunk.sequence].allocation.plan
        return np.array(self.policy.rules.repair.rows(plan.spans, plan.request.id), np.int64)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, chunks: list[ScheduledChunk], decodes: list[Sequence]) -> None:
        if self.policy.rules.repair.measured and chunks and is_repair(chunks[0]):
            self._blend(chunks[0])
        else:
            self._plain(chunks, decodes)

    def _plain(self, chunks: list[ScheduledChunk], decodes: list[Sequence]) -> None:
        parts = [chunk_rows(self._request_state(c.sequence), c, self.key_layout, self._repaired(c)) for c in chunks]
        tails = self._decode_rows(decodes)
        ends = np.cumsum([len(part.indices) for part in parts], dtype=np.int64)
        last = np.array([chunk.last for chunk in chunks], bool)
        count = int(ends[-1]) if parts else 0
        asked = np.concatenate([ends[last] - 1, count + np.arange(len(decodes))])
        sequences = [chunk.sequence for chunk in chunks]
        rows = self._packed(sequences, parts, asked, tails)
        attention = AttentionMetadata(parts, self._reader, tails)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.pool.write(layer, rows.slots, key, value)
            return attention.attend(layer, query)

        recurrence = self._recurrence(chunks, decodes)
        logits = self._logits(rows, attend, recur=None if recurrence is None else recurrence.run)
        if recurrence is not None:
            recurrence.done()
        self._choose([*(chunk.sequence for chunk in chunks if chunk.last), *decodes], logits)

    def _recurrence(self, chunks: list[ScheduledChunk], decodes: list[Sequence]) -> Recurrence | None:
        """What the recurrent layers do with the rows of chunks and decodes; None where there are none."""
        if self.memory is None:
            return None
        rows = [StateRows(chunk.work.cache_span, chunk.start, chunk.stop, chunk.captures) for chunk in chunks]
        rows += [self._decoded(sequence) for sequence in decodes]
        states = [self._state(sequence) for sequence in [*(chunk.sequence for chunk in chunks), *decodes]]
        return self.memory.recurrence(zip(states, rows, strict=True), self.model.device)

    def _decoded(self, sequence: Sequence) -> StateRows:
        place = sequence.prompt + sequence.generated - 1
        return StateRows(len(self._request_states[sequence].spans) - 1, place, place + 1, ())

    def _decode_rows(self, sequences: list[Sequence]) -> DecodeRows | None:
        """Their next rows; those of the step before go on where the same sequences decode."""
        before = self._decodes
        if before is None or before.sequences is not sequences:
            states, known = [self._request_states[s] for s in sequences], {} if before is None else before.reads
            before = DecodeRows(sequences, states, self._reader, known) if sequences else None
        if before is not None:
            before.advance()
        self._decodes = before
        return before

    def _blend(self, chunk: ScheduledChunk) -> None:
        """A measured repair: the rows that are kept change from layer to layer."""
        request_state, rule = self._request_state(chunk.sequence), self.policy.rules.repair
        spans = request_state.allocation.plan.spans
        everything = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        rows = chunk_rows(request_state, chunk, self.key_layout, everything)
        free = torch.from_numpy(rows.free).to(self.model.device)
        chooser = DeviationChooser(rule, rule.count(spans), self.model.layers, free)
        packed = self._packed([chunk.sequence], [rows], np.empty(0, np.int64))
        blend = Blend(chooser, rows, packed.slots, self.pool, self._attention, rule.writes)
        with suppress(NothingLeft):
            self._logits(packed, blend.attend, keep=blend.keep, project=blend.project)

    def _attention(self, *rows: QueryRows) -> AttentionMetadata:
        return AttentionMetadata(rows, self._reader)

    def _packed(
        self, sequences: list[Sequence], parts: list[QueryRows], asked: np.ndarray, tails: DecodeRows | None = None
    ) -> PackedRows:
        """Rows of one forward, each part of a sequence, and behind them those that decode; one copy to the device."""
        ids = [self._ids(s, part.indices) for s, part in zip(sequences, parts, strict=True)]
        rotations, slots = [part.rotations for part in parts], [part.slots for part in parts]
        if tails is not None:
            ids.append(np.array([self.outputs[s.request.id][s.generated - 1] for s in tails.sequences], np.int64))
            rotations.append(tails.rotations)
            slots.append(tails.slots)
        arrays = [np.concatenate(part) for part in (ids, rotations, slots)]
        self._copier.note(arrays[2], arrays[1])
        return PackedRows(*to_device([*arrays, asked], torch.int64, self.model.device))

    def _logits(
        self,
        rows: PackedRows,
        attend: Attend,
        keep: Keep | None = None,
        recur: Recur | None = None,
        project: Project | None = None,
    ) -> Tensor:
        return self.model.forward(rows.ids, rows.rotations, attend, rows.asked, keep, recur, project, step=self.steps)

    def _ids(self, sequence: Sequence, indices: np.ndarray) -> np.ndarray:
        tokens, prompt = self._request_states[sequence].tokens, sequence.prompt
        if not len(indices) or indices[-1] < prompt:
            return tokens[indices]
        return np.concatenate([tokens, np.array(self.outputs[sequence.request.id], np.int64)])[indices]

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> None:
        draws = [Draw(sequence.request.id, sequence.generated) for sequence in sequences]
        for sequence, row, token in zip(sequences, logits, self._sampler.choose(logits, draws), strict=True):
            if self._on_logits is not None:
                self._on_logits(sequence, row)
            output = self.outputs.setdefault(sequence.request.id, [])
            known = sequence.request.output
            token = token if known is None else int(known[sequence.generated])  # teacher forcing
            output[sequence.generated :] = [token]  # a request of the same id may have been served before

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
