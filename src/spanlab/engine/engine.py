"""The real backend: executes the scheduler's step plans on a model and a paged pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, perf_counter

import numpy as np
import torch
from torch import Tensor

from spanlab.core.backend import StepResult, finished_after
from spanlab.core.passes import is_repair, of_span, passes
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.scheduler import ScheduledChunk, ScheduledStep, Sequence
from spanlab.engine.agreement import check_memory, check_parts
from spanlab.engine.blend import Blend, NothingLeft
from spanlab.engine.copies import Copier
from spanlab.engine.deviation import DeviationChooser
from spanlab.engine.hook import Attend, Keep, Project, Recur
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.memory import Memory
from spanlab.engine.model import SpanModel
from spanlab.engine.node_pages import NodePages
from spanlab.engine.pool import PagePool
from spanlab.engine.reading import Reading
from spanlab.engine.reads import Reads
from spanlab.engine.recurrent import Recurrence
from spanlab.engine.rows import Rows, chunk_rows, section_rows
from spanlab.engine.running_state import RunningState, StateRows
from spanlab.engine.sampling import Draw, Sampler
from spanlab.engine.seat import Seat
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
    `counter`    nanoseconds of a monotonic clock
    """

    def __init__(
        self,
        model: SpanModel,
        pool: PagePool,
        policy: TreePolicy,
        reading: Reading,
        *,
        positions: int,
        sampler: Sampler | None = None,
        on_logits: OnLogits | None = None,
        states: StatePool | None = None,
        maps: SpanMaps | None = None,
        counter: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.model, self.pool, self.policy, self.reading = model, pool, policy, reading
        self.memory = None if states is None else Memory(states, maps)
        check_parts(model, pool, policy, reading)
        check_memory(model, policy, states, maps)
        tree = policy.store.tree
        self.nodes = NodePages(tree.page, pool.give)
        tree.watcher = self.nodes
        if self.memory is not None:
            policy.store.on_drop = self.memory.drop
        self.outputs: dict[int, list[int]] = {}
        self._sampler, self._on_logits = sampler or Sampler(), on_logits
        self._table = angle_table(model.rotation.frequencies, positions + 1, model.device)
        self._copier = Copier(pool, self._table, reading, model.rotation.interleaved)
        self._seats: dict[Sequence, Seat] = {}
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
        across = self.reading.copies or repair.kind != "none"
        seconds = dict.fromkeys(PHASES, 0.0)
        for at, chunks in enumerate(passes(step, across, repair.measured)):
            seconds["copy_s"] += self._timed(self._copy, chunks)
            seconds[_kind(chunks)] += self._timed(self._forward, chunks, step.decodes if at == 0 else [])
        self.steps += 1
        return seconds

    def completed(self, step: ScheduledStep) -> None:
        """Follow what the policy stored of a step; to be called right after the scheduler's commit."""
        for chunk in step.chunks:
            seat = self._seats[chunk.sequence]
            for index in chunk.work.sections:
                seat.adopt(index)
        for sequence in step.decodes:
            if sequence.allocation is None:  # it has ended, and its output may be stored
                self._seats[sequence].adopt(len(self._seats[sequence].places) - 1)

    def close(self) -> None:
        """Give back what ended requests still hold; what is stored stays."""
        self._clear()

    # -- seats --------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Take back the pages of those who have ended or were preempted since the last step."""
        for sequence, seat in list(self._seats.items()):
            if sequence.allocation is not seat.allocation:
                seat.leave()
                del self._seats[sequence]

    def _claim(self, step: ScheduledStep) -> None:
        """Give pages to what the policy stored while it planned this step, in the order in which it did."""
        if not self.policy.stores_when_scheduled:
            return
        for chunk in step.chunks:
            for index in chunk.work.sections:
                self._seat(chunk.sequence).claim(index)

    def _seat(self, sequence: Sequence) -> Seat:
        if sequence not in self._seats:
            allocation = sequence.allocation
            assert allocation is not None, "only who is admitted is seated"
            state = None if self.memory is None else self.memory.begin(allocation)
            self._seats[sequence] = Seat(sequence, allocation, self.pool, self.nodes, self.reading, state)
        return self._seats[sequence]

    def _copy(self, chunks: list[ScheduledChunk]) -> None:
        repair = self.policy.rules.repair
        for chunk in chunks:
            seat = self._seat(chunk.sequence)
            begins = chunk.start == chunk.work.start and not repair.measured
            self._copier.before(seat, chunk, self._repaired(chunk) if begins else None)
        if self.memory is not None:
            for sequence, chunk in {chunk.sequence: chunk for chunk in reversed(chunks)}.items():
                self.memory.load(self._state(sequence), chunk.work.section)

    def _state(self, sequence: Sequence) -> RunningState:
        state = self._seats[sequence].state
        assert state is not None, "a request of a hybrid model has a state"
        return state

    def _repaired(self, chunk: ScheduledChunk) -> np.ndarray | None:
        """Prompt positions that a repair computes again, all of them, where that is known beforehand."""
        if not is_repair(chunk):
            return None
        plan = self._seats[chunk.sequence].allocation.plan
        return np.array(self.policy.rules.repair.rows(plan.spans, plan.request.id), np.int64)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, chunks: list[ScheduledChunk], decodes: list[Sequence]) -> None:
        if self.policy.rules.repair.measured and chunks and is_repair(chunks[0]):
            self._blend(chunks[0])
        else:
            self._plain(chunks, decodes)

    def _plain(self, chunks: list[ScheduledChunk], decodes: list[Sequence]) -> None:
        rows = [chunk_rows(self._seat(c.sequence), c, self.reading, self._repaired(c)) for c in chunks]
        rows += [self._decode_rows(sequence) for sequence in decodes]
        sequences = [*(chunk.sequence for chunk in chunks), *decodes]
        asks = [*(chunk.last for chunk in chunks), *(True for _ in decodes)]
        ends = np.cumsum([len(part.places) for part in rows]) - 1
        slots = self._tensor(np.concatenate([part.slots for part in rows]))
        reads = self._reads(*rows)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.pool.write(layer, slots, key, value)
            return reads.attend(layer, query)

        recurrence = self._recurrence(chunks, decodes)
        recur = None if recurrence is None else recurrence.run
        logits = self._logits(sequences, rows, attend, ends[asks], recur=recur)
        if recurrence is not None:
            recurrence.done()
        self._choose([sequence for sequence, asked in zip(sequences, asks, strict=True) if asked], logits)

    def _recurrence(self, chunks: list[ScheduledChunk], decodes: list[Sequence]) -> Recurrence | None:
        """What the recurrent layers do with the rows of chunks and decodes; None where there are none."""
        if self.memory is None:
            return None
        rows = [StateRows(chunk.work.section, chunk.start, chunk.stop, chunk.captures) for chunk in chunks]
        rows += [self._decoded(sequence) for sequence in decodes]
        states = [self._state(sequence) for sequence in [*(chunk.sequence for chunk in chunks), *decodes]]
        return self.memory.recurrence(zip(states, rows, strict=True), self.model.device)

    def _decoded(self, sequence: Sequence) -> StateRows:
        place = sequence.prompt + sequence.generated - 1
        return StateRows(len(self._seats[sequence].places) - 1, place, place + 1, ())

    def _decode_rows(self, sequence: Sequence) -> Rows:
        section, start, stop, _ = self._decoded(sequence)
        return section_rows(self._seats[sequence], section, start, stop, self.reading)

    def _blend(self, chunk: ScheduledChunk) -> None:
        """A measured repair: the rows that are kept change from layer to layer."""
        seat, rule = self._seat(chunk.sequence), self.policy.rules.repair
        spans = seat.allocation.plan.spans
        everything = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        rows = chunk_rows(seat, chunk, self.reading, everything)
        free = torch.from_numpy(rows.free).to(self.model.device)
        chooser = DeviationChooser(rule, rule.count(spans), self.model.layers, free)
        blend = Blend(chooser, rows, self._tensor(rows.slots), self.pool, self._reads, rule.writes)
        with suppress(NothingLeft):
            none, sequences = np.empty(0, np.int64), [chunk.sequence]
            self._logits(sequences, [rows], blend.attend, none, keep=blend.keep, project=blend.project)

    def _reads(self, *rows: Rows) -> Reads:
        return Reads(rows, self.model, self.pool, self._table, self.reading)

    def _logits(
        self,
        sequences: list[Sequence],
        rows: list[Rows],
        attend: Attend,
        asked: np.ndarray,
        keep: Keep | None = None,
        recur: Recur | None = None,
        project: Project | None = None,
    ) -> Tensor:
        for part in rows:
            self._copier.note(part.slots, part.turns)
        ids = np.concatenate([self._ids(s, part.places) for s, part in zip(sequences, rows, strict=True)])
        turns = np.concatenate([part.turns for part in rows])
        tensors = self._tensor(ids), self._tensor(turns)
        return self.model.forward(*tensors, attend, self._tensor(asked), keep, recur, project, step=self.steps)

    def _ids(self, sequence: Sequence, places: np.ndarray) -> np.ndarray:
        tokens, prompt = self._seats[sequence].tokens, sequence.prompt
        if not len(places) or places[-1] < prompt:
            return tokens[places]
        return np.concatenate([tokens, np.array(self.outputs[sequence.request.id], np.int64)])[places]

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> None:
        draws = [Draw(sequence.request.id, sequence.generated) for sequence in sequences]
        for sequence, row, token in zip(sequences, logits, self._sampler.choose(logits, draws), strict=True):
            if self._on_logits is not None:
                self._on_logits(sequence, row)
            output = self.outputs.setdefault(sequence.request.id, [])
            known = sequence.request.output
            token = token if known is None else int(known[sequence.generated])  # teacher forcing
            output[sequence.generated :] = [token]  # a request of the same id may have been served before

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
