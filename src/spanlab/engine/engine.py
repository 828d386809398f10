"""The real backend: executes scheduled steps on a model and a paged KV pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Ordered
from functools import partial
from time import monotonic_ns, perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spanlab.core.plan import TreeAllocation
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import SpanSettings
from spanlab.core.step import (
    ScheduledChunk,
    ScheduledSequence,
    ScheduledStep,
    StepResult,
    finished_after,
    is_repair,
    of_span,
    passes,
)
from spanlab.core.token_string import Tokens
from spanlab.engine.maps import SpanMaps
from spanlab.engine.model import LARGEST, AttentionContext, SpanModel, pieces_of
from spanlab.engine.oracle import check_components, check_memory
from spanlab.engine.outputs import DueToken, OnLogits, Sampler, StepTokens
from spanlab.engine.pages import MIN_BYTES, NodePages, PageList, PagePool, PageTable, TransferBatch
from spanlab.engine.repair import MeasuredRepair
from spanlab.engine.request_state import RequestState
from spanlab.engine.rows import (
    AttentionMetadata,
    Copier,
    DecodeRows,
    Move,
    Packer,
    QueryRows,
    TailRows,
    cache_span_rows,
    chunk_rows,
)
from spanlab.engine.settings import GRAPHS, PLAIN
from spanlab.engine.slots import StatePool
from spanlab.engine.states import Memory, RunningState, StateRows, state_rows
from spanlab_kernels.attention.batch import GroupArrays, Spans, joined
from spanlab_kernels.blocks import angle_table

# ------------------------------------------------------------------------------
# Launch modes of decode-only forwards: unpadded, or padded to a few sizes and for_replay as
# CUDA graphs.
#
# A replay needs equal launches and addresses. So rows and spans are padded to powers of
# two, all inputs of a step are in one buffer, and other values that affect launches are
# part of a key. One graph is captured per key.
# ------------------------------------------------------------------------------

_SPARE_PAGES = 1

Work = Callable[[], Tensor]
"""work() -> logits of all rows from the transferred inputs; may be called again after new inputs
replace them."""


class Prepare(Protocol):
    """Adds the inputs of a forward to a transfer; returns a graph key and the work.

    With `for_replay` the launches of the work may depend only on input addresses and the key, not
    on input values.
    """

    def __call__(
        self, tails: TailRows | None, transfer: TransferBatch, *, for_replay: bool
    ) -> tuple[Hashable, Work]: ...


class Plain:
    """Launches every forward unpadded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, tails: TailRows | None, prepare: Prepare) -> Tensor:
        """Run the forward; return logits of the rows."""
        transfer = TransferBatch(self._device)
        _, work = prepare(tails, transfer, for_replay=False)
        transfer.send()
        return work()


Replay = Callable[[Hashable, Work], Tensor]
"""replay(key, work) -> the work's logits; work of equal keys differs only in input values."""


def run_eager(key: Hashable, work: Work) -> Tensor:
    """Run the work without graphs: the CPU's mode, and the reference for replays."""
    return work()


class CudaGraphs:
    """Captures the work of each key once and replays it; graphs share one memory pool, since one
    runs at a time.

    Work advances recurrent states, so each call runs it exactly once: first eagerly, later by
    replay. A capture does not execute it.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, key: Hashable, work: Work) -> Tensor:
        if key not in self._captured:
            # on a side stream, to compile kernels and initialise libraries before the capture
            current, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
            side_stream.wait_stream(current)
            with torch.cuda.stream(side_stream):
                logits = work()
            current.wait_stream(side_stream)
            # imports Triton, which a CPU does not need
            from spanlab_kernels.attention.kernel import forget_lists

            forget_lists()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                out = work()
            forget_lists()  # tensors in the graph's memory belong to its replays
            self._captured[key] = graph, out
            return logits
        graph, out = self._captured[key]
        graph.replay()
        return out


class Padded:
    """Pads forwards to powers of two of rows and spans. Padding rows read and write a reserved
    page.

    `replay`  runs the work of a forward
    """

    def __init__(
        self, device: torch.device, pages: PageTable, pool: PagePool, replay: Replay
    ) -> None:
        self._device, self._replay = device, replay
        spare = pool.allocate(_SPARE_PAGES)
        self._slot, self._spare = int(spare[0]) * pool.shape.page_size, PageList(pages, spare)
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def run(self, tails: TailRows, prepare: Prepare) -> Tensor:
        """Run the padded forward; return logits of the rows without padding."""
        rows = pad_rows(tails, self._slot, self._spare.start)
        size = len(rows.slots), len(rows.independent)
        if size not in self._buffers:
            # several int64 arrays per row and span, with alignment
            room = max(MIN_BYTES, 256 * sum(size))
            self._buffers[size] = torch.empty(room, dtype=torch.uint8, device=self._device)
        transfer = TransferBatch(self._device, self._buffers[size])
        key, work = prepare(rows, transfer, for_replay=True)
        transfer.send()
        # cloned, because the next replay overwrites these logits
        return self._replay((size, key), work)[: len(tails.slots)].clone()


def pad_rows(tails: TailRows, slot: int, page: int) -> TailRows:
    """Decode rows and spans, padded to the next power of two; padding rows have token 0 and use one
    slot and page."""
    more = _next_power(len(tails.slots)) - len(tails.slots)
    ones, none = np.ones(more, np.int64), np.zeros(more, np.int64)
    # each padding row reads only the key that it writes
    rows = GroupArrays(ones, ones, none, none, Spans(none, ones, none, none + page, none))
    groups = joined([tails.groups, rows])
    spans = len(tails.independent) + more
    unread = np.zeros(_next_power(spans) - spans, np.int64)
    of_span = Spans(*(np.concatenate([values, unread]) for values in groups.of_span))
    padding = np.zeros(len(of_span.index) - len(tails.independent), bool)
    return TailRows(
        np.concatenate([tails.ids, none]),
        np.concatenate([tails.rotations, none]),
        np.concatenate([tails.slots, np.full(more, slot)]),
        groups._replace(of_span=of_span),
        np.concatenate([tails.independent, padding]),
    )


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def new_decoder(
    decode: str, device: torch.device, pages: PageTable, pool: PagePool
) -> Plain | Padded:
    """The launch mode `engine.decode` of decode-only forwards."""
    if decode == PLAIN:
        return Plain(device)
    return Padded(device, pages, pool, CudaGraphs() if decode == GRAPHS else run_eager)


def spare_pages(decode: str) -> int:
    """Number of pages that a decoder reserves in the pool."""
    return 0 if decode == PLAIN else _SPARE_PAGES


# ------------------------------------------------------------------------------
# Durations of the phases of a step on the device that computes them.
# ------------------------------------------------------------------------------

#: Seconds of one step by phase. Each forward counts as the first phase below `copy_s` that applies
#: to it.
PHASES = (
    "plan_s",  # since the previous step: storing, records, scheduling
    "copy_s",  # outside forwards: span copies, rotation, copy-on-write, loads of states, application of maps
    "repair_s",
    "prefill_s",  # ordered text
    "fill_s",  # spans
    "decode_s",
)


class HostClock:
    """Clock for synchronous work: runs the work of one step and sums the time of each phase."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, work: Callable[..., None], *args: object) -> None:
        """Run work of a phase."""
        began = perf_counter()
        work(*args)
        self._seconds[phase] += perf_counter() - began

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""
        return self._seconds


class StreamClock:
    """Clock for asynchronous work of a CUDA stream, by events around each phase; idle time of the
    stream counts.

    Only `seconds` synchronizes, and usually without waiting, because the tokens have been read by
    then.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, phase: str, work: Callable[..., None], *args: object) -> None:
        """Launch work of a phase."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(*args)
        end.record()
        self._spans.append((phase, begin, end))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase; waits for the end of all phases."""
        totals: defaultdict[str, float] = defaultdict(float)
        if self._spans and not self._spans[-1][2].query():
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            totals[phase] += begin.elapsed_time(end) * 1e-3
        return totals


def clock_of(device: torch.device) -> HostClock | StreamClock:
    """Create a clock for one step on a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def phase_of(chunks: list[ScheduledChunk]) -> str:
    """The phase of a forward with these chunks and any decodes."""
    if not chunks:
        return "decode_s"
    if any(is_repair(chunk) for chunk in chunks):
        return "repair_s"
    return "fill_s" if all(of_span(chunk) for chunk in chunks) else "prefill_s"


# ------------------------------------------------------------------------------
# The forwards of a step: packed rows of several requests, launched together, and their logits.
# ------------------------------------------------------------------------------


class Forwards:
    """Launches the forwards of one engine.

    `memory`          states and maps of recurrent layers, if the model has any
    `request_states`  states of all requests that have rows
    `decode`          launch mode of decode-only forwards, see `EngineSettings`
    `prefill`         launch mode of all other forwards, see `EngineSettings`
    """

    def __init__(
        self,
        context: AttentionContext,
        memory: Memory | None,
        packer: Packer,
        request_states: Mapping[ScheduledSequence, RequestState],
        decode: str,
        prefill: str,
    ) -> None:
        self._context = context
        self._memory = memory
        self._packer = packer
        self._request_states = request_states
        self._device = context.model.device
        self._decodes: DecodeRows | None = None
        self._launch = Plain(self._device)
        self._decoder = new_decoder(decode, self._device, context.pages, context.pool)
        self._pieces = pieces_of(context.model) if prefill == GRAPHS else None

    def run(
        self,
        chunks: list[ScheduledChunk],
        repaired: Ordered[np.ndarray | None],
        decodes: list[ScheduledSequence],
        times: int,
    ) -> tuple[list[DueToken], Tensor]:
        """Compute chunks and `times` tokens per decode; return the tokens to sample and their
        logits.

        `repaired`  by chunk: prompt positions that a repair recomputes, or None
        """
        parts = [
            chunk_rows(self._request_states[chunk.sequence], chunk, positions)
            for chunk, positions in zip(chunks, repaired, strict=True)
        ]
        sequences = [chunk.sequence for chunk in chunks]
        logits_counts = [int(chunk.last) for chunk in chunks]
        everyone, all_counts = [*sequences, *decodes], logits_counts + [times] * len(decodes)
        due = [
            DueToken(sequence, sequence.generated + offset)
            for sequence, count in zip(everyone, all_counts, strict=True)
            for offset in range(count)
        ]
        tails = self._decode_rows(decodes) if times == 1 else None
        if tails is None:
            for sequence in decodes:
                rows = self._decode_state_rows(sequence, times)
                request_state = self._request_states[sequence]
                parts.append(cache_span_rows(request_state, rows.cache_span, rows.start, rows.stop))
            sequences, logits_counts = everyone, all_counts
        states = self._state_rows(chunks, decodes, times)
        prepare = partial(self._prepared, sequences, parts, logits_counts, states)
        logits = (
            self._launch.run(tails, prepare)
            if tails is None or parts
            else self._decoder.run(tails, prepare)
        )
        if self._memory is not None:
            self._memory.finish()
        return due, logits

    def _prepared(
        self,
        sequences: list[ScheduledSequence],
        parts: list[QueryRows],
        logits_counts: list[int],
        states: list[tuple[RunningState, StateRows]],
        tails: TailRows | None,
        transfer: TransferBatch,
        *,
        for_replay: bool,
        answer: Tokens | None = None,
    ) -> tuple[Hashable, Work]:
        """Prepare the forward of `parts` and `tails`, see `graphs.Prepare`; `answer` as in
        `Packer.pack`."""
        rows = self._packer.pack(sequences, parts, logits_counts, tails, transfer, answer)
        recur = None
        if self._memory is not None and states:
            decode_rows = None if parts or tails is None else len(tails.slots)
            recur = self._memory.recurrence(states, self._device, transfer.add, decode_rows).run
        # added last, because the number of page ids differs between steps
        attention, key = AttentionMetadata(parts, self._context, transfer, tails), None
        model, pool = self._context.model, self._context.pool
        if for_replay:
            attention_key, attention = attention.for_replay()
            key = attention_key, None if self._memory is None else self._memory.slab_rows

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pool.write(layer, rows.slots, keys, values)
            return attention.attend(layer, query)

        pieces = None if for_replay or len(rows.ids) > LARGEST else self._pieces
        forward = model.forward if pieces is None else pieces.forward
        return key, lambda: forward(rows.ids, rows.rotations, attend, rows.logits_rows, recur=recur)

    def _state_rows(
        self, chunks: list[ScheduledChunk], decodes: list[ScheduledSequence], times: int
    ) -> list[tuple[RunningState, StateRows]]:
        """States and their rows in chunks and decodes; empty for models without recurrent
        layers."""
        if self._memory is None:
            return []
        states = self._request_states
        rows = [
            (states[chunk.sequence].running, state_run)
            for chunk in chunks
            for state_run in state_rows(chunk)
        ]
        rows += [
            (states[sequence].running, self._decode_state_rows(sequence, times))
            for sequence in decodes
        ]
        return rows

    def _decode_state_rows(self, sequence: ScheduledSequence, times: int) -> StateRows:
        request_state = self._request_states[sequence]
        start = sequence.prompt + sequence.generated - 1
        capture_positions = request_state.allocation.captures
        captures = [position for position in capture_positions if start < position <= start + times]
        return StateRows(len(request_state.spans) - 1, start, start + times, captures)

    def _decode_rows(self, sequences: list[ScheduledSequence]) -> TailRows | None:
        """Next rows of decoding sequences; the previous rows are advanced if the sequences are
        unchanged."""
        if not sequences:
            self._decodes = None
            return None
        if self._decodes is None or self._decodes.sequences is not sequences:
            states = [self._request_states[sequence] for sequence in sequences]
            previous = {} if self._decodes is None else self._decodes.reads
            self._decodes = DecodeRows(sequences, states, self._context, previous)
        return self._decodes.advance(self._packer.outputs)

    # -- alternative answers -----------------------------------------------------------------------

    def answer_logits(self, sequence: ScheduledSequence, answers: Ordered[Tokens]) -> list[Tensor]:
        """Logits [tokens − 1, V] of each answer after a prompt, without its first token; for
        attention-only models.

        The last prompt token predicts the first token. The sequence's pages must still be
        allocated: keys and values of an alternative answer overwrite those of the known answer,
        which are restored at the end.
        """
        known = sequence.request.output
        assert known is not None, "the KV of a sampled answer cannot be restored"
        *logits, _ = [self._after_prompt(sequence, tokens) for tokens in (*answers, known)]
        return logits

    def _after_prompt(self, sequence: ScheduledSequence, answer: Tokens) -> Tensor:
        model, state, count = self._context.model, self._request_states[sequence], len(answer) - 1
        if not count:
            return torch.empty(0, model.vocab_size)
        rows = cache_span_rows(
            state, len(state.spans) - 1, sequence.prompt, sequence.prompt + count
        )
        logits = self._launch.run(
            None, partial(self._prepared, [sequence], [rows], [count], [], answer=answer)
        )
        if not logits.isfinite().all():
            raise FloatingPointError(
                f"Model {model.name!r} gave logits that are no finite numbers."
            )
        return logits


OnFinished = Callable[[ScheduledSequence, Callable[[Ordered[Tokens]], list[Tensor]]], None]


class Engine:
    """The real backend: one model, its pools and one policy. Step durations are measured and
    include host work.

    `states`     pool of recurrent states, for a model with recurrent layers
    `maps`       pools of span maps, if the policy's rules use maps
    `positions`  maximum length of prompt and output together
    `outputs`    tokens generated so far, by request id
    `on_finished`  called with each finished sequence and a function that returns logits of
                   alternative answers, see
                 `Forwards.answer_logits`; its time counts for no step
    `at_once`    whether the remaining tokens of known answers are computed in one step while no
                 arrival is due
    `decode`     launch mode of decode-only forwards, see `EngineSettings`
    `prefill`    launch mode of all other forwards, see `EngineSettings`
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
        prefill: str = PLAIN,
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
        self._context = context = AttentionContext(
            model, pool, PageTable(model.device), table, key_layout
        )
        self._copier = Copier(context)
        self._request_states: dict[ScheduledSequence, RequestState] = {}
        packer = Packer(self._request_states, self.outputs, self._copier, model.device)
        self._forwards = Forwards(
            context, self.memory, packer, self._request_states, decode, prefill
        )
        self._measured = MeasuredRepair(policy.rules.repair, context, packer)
        self.steps = 0
        self._at_once = at_once
        self._counter, self._since = counter, counter()

    def resume(self) -> None:
        """Restart the clock of the next step."""
        self._since = self._counter()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Execute a scheduled step; its duration is measured from the end of the previous step."""
        began = self._counter()
        times = self._steps_ahead(step) if self._at_once and deadline_ns is None else 1
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
        """Number of tokens per answer that one forward computes: all remaining ones if all answers
        are known.

        It is limited by memory (`max_repeats`, free pages), and 1 for a step with a prompt chunk or
        an unknown answer. The policy reserves memory for the tokens after the first once they are
        computed.
        """
        if step.chunks or any(sequence.request.output is None for sequence in step.decodes):
            return 1
        remaining = min(
            (sequence.request.output_len - sequence.generated for sequence in step.decodes),
            default=1,
        )
        times, missing = min(remaining, step.max_repeats), 0
        for sequence in step.decodes if times > 1 else ():
            state = self._request_states[sequence]
            stop = sequence.held_tokens + times - state.spans[-1].cache_span.start
            missing += state.missing(len(state.spans) - 1, stop)
        return times if missing <= self.pool.free_pages else 1

    def run(self, step: ScheduledStep, times: int = 1) -> dict[str, float]:
        """Compute a scheduled step, with `times` tokens per decode; return the seconds of its
        phases."""
        self._clear()
        # allocate pages for blocks that the policy stored during scheduling, in the same order
        if self.policy.stores_when_scheduled:
            for chunk in step.chunks:
                for index in chunk.work.cache_spans:
                    self._request_state(chunk.sequence).claim(index)
        repair = self.policy.rules.repair
        across = self.key_layout.copies or repair.kind != "none"
        clock = clock_of(self.model.device)
        for index, chunks in enumerate(passes(step, across, repair.measured)):
            clock.run("copy_s", self._copy, chunks)
            clock.run(
                phase_of(chunks), self._forward, chunks, step.decodes if index == 0 else [], times
            )
        self._tokens.read(self.steps)
        self.steps += 1
        return {**dict.fromkeys(PHASES, 0.0), **clock.seconds()}

    def completed(self, step: ScheduledStep) -> None:
        """Register the pages and states that the policy stored; call directly after
        `Scheduler.complete`."""
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
            elif (
                request_state.state is not None
            ):  # a state of its output may have been replaced by a newer one
                request_state.state.adopt()

    def close(self) -> None:
        """Free the memory of finished requests; stored blocks stay."""
        self._clear()

    # -- requests ----------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Free the pages of requests that finished or were preempted since the last step."""
        for sequence, request_state in list(self._request_states.items()):
            if sequence.allocation is not request_state.allocation:
                request_state.free()
                del self._request_states[sequence]

    def _request_state(self, sequence: ScheduledSequence) -> RequestState:
        if sequence not in self._request_states:
            allocation = sequence.allocation
            assert isinstance(allocation, TreeAllocation), (
                "the engine runs allocations of `tree` only"
            )
            state = None if self.memory is None else self.memory.begin(allocation)
            self._request_states[sequence] = RequestState(
                sequence, allocation, self._context, self.nodes, state
            )
        return self._request_states[sequence]

    def _copy(self, chunks: list[ScheduledChunk]) -> None:
        moves: list[Move] = []
        for chunk in chunks:
            request_state = self._request_state(chunk.sequence)
            begins = chunk.start == chunk.work.start and not self.policy.rules.repair.measured
            moves += self._copier.moves_before(
                request_state, chunk, self._repaired(chunk) if begins else None
            )
        self._copier.copy(moves)
        if self.memory is not None:
            for sequence, chunk in {chunk.sequence: chunk for chunk in reversed(chunks)}.items():
                self.memory.load(self._request_states[sequence].running, state_rows(chunk)[0])

    def _repaired(self, chunk: ScheduledChunk) -> np.ndarray | None:
        """Prompt positions in a chunk that a repair recomputes, for repairs that do not drop rows
        between layers."""
        if not is_repair(chunk):
            return None
        chosen = self._request_states[chunk.sequence].repaired_by(self.policy.rules.repair)
        return chosen[(chosen >= chunk.work.start) & (chosen < chunk.work.stop)]

    # -- forwards ----------------------------------------------------------------------------------

    def _forward(
        self, chunks: list[ScheduledChunk], decodes: list[ScheduledSequence], times: int
    ) -> None:
        rule = self.policy.rules.repair
        if not (rule.measured and chunks and is_repair(chunks[0])):
            self._compute(chunks, decodes, times)
        elif rule.probes:
            # run a repair whose tokens are selected by a probe before pages are copied
            chunk = chunks[0]
            request_state = self._request_state(chunk.sequence)
            request_state.repaired = chosen = self._measured.probe(request_state, chunk)
            self._copier.copy(self._copier.moves_before(request_state, chunk, chosen))
            self._compute([chunk], [], times=1)
        else:
            self._measured.blend(self._request_state(chunks[0].sequence), chunks[0])

    def _compute(
        self, chunks: list[ScheduledChunk], decodes: list[ScheduledSequence], times: int
    ) -> None:
        repaired = [self._repaired(chunk) for chunk in chunks]
        self._tokens.choose(*self._forwards.run(chunks, repaired, decodes, times))
