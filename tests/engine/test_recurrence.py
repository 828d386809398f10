"""Recurrent layers run once over the rows of a batch, for all sequences and captures."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from spanlab.engine.pages import TransferBatch
from spanlab.engine.recurrent import MIXER, DecodeRecurrence, Recurrence, StateScan
from spanlab.engine.slots import ALL, StatePool

from .factories import make_slow_hybrid

LENGTHS = (70, 1, 33, 5, 1)
CUTS = {0: (7, 64), 2: (32,)}  # where states of a sequence are kept
KINDS = ("qwen3_5_text", "qwen3_next")


def mixer_of(kind: str) -> nn.Module:
    return getattr(make_slow_hybrid(kind).hf.base_model.layers[1], MIXER).mixer


def pool_of(kind: str) -> StatePool:
    model = make_slow_hybrid(kind)
    return StatePool(model.state_shape, model.dtype, "cpu")


def begin(pool: StatePool, number: int) -> int:
    """A slot with a distinct state."""
    slot, draw = pool.allocate_running(), torch.Generator().manual_seed(number)
    for tensor in (pool.recurrent(1, slot), pool.conv(1, slot)):
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    return slot


def sequence(pool: StatePool, number: int, first: int) -> list[StateScan]:
    slot, edges = begin(pool, number), [0, *CUTS.get(number, ()), LENGTHS[number]]
    keeps = [pool.allocate() if stop < LENGTHS[number] else None for stop in edges[1:]]
    return [
        StateScan(first + start, first + stop, slot, start, keep)
        for (start, stop), keep in zip(pairwise(edges), keeps, strict=True)
    ]


def states_of(pool: StatePool, pieces: list[StateScan]) -> list[Tensor]:
    slots = [piece.copy_slot for piece in pieces[:-1]] + [pieces[-1].slot]
    return [each for slot in slots for each in (pool.recurrent(1, slot), pool.conv(1, slot))]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_each_as_alone(kind):
    mixer, pool = mixer_of(kind), pool_of(kind)
    hidden = torch.randn(1, sum(LENGTHS), 64, generator=torch.Generator().manual_seed(3))
    starts = list(accumulate(LENGTHS, initial=0))
    packed = [sequence(pool, number, starts[number]) for number in range(len(LENGTHS))]
    together = Recurrence(pool, packed, pool.device)
    out = together.run(1, mixer, hidden)
    together.finish()
    for number, (start, stop) in enumerate(pairwise(starts)):
        alone = sequence(pool, number, 0)
        recurrence = Recurrence(pool, [alone], pool.device)
        assert torch.allclose(recurrence.run(1, mixer, hidden[:, start:stop]), out[:, start:stop], atol=1e-5)
        recurrence.finish()
        for state, other in zip(states_of(pool, alone), states_of(pool, packed[number]), strict=True):
            assert torch.allclose(state, other, atol=1e-5)


@torch.no_grad()
def test_a_mixer_runs_once_whatever_is_packed_and_kept(monkeypatch):
    mixer, pool = mixer_of(KINDS[0]), pool_of(KINDS[0])
    projected, project = [], mixer.out_proj.forward
    monkeypatch.setattr(mixer.out_proj, "forward", lambda rows: projected.append(rows.shape) or project(rows))
    starts = list(accumulate(LENGTHS, initial=0))
    packed = [sequence(pool, number, starts[number]) for number in range(len(LENGTHS))]
    Recurrence(pool, packed, pool.device).run(1, mixer, torch.randn(1, sum(LENGTHS), 64))
    assert [shape[1] for shape in projected] == [sum(LENGTHS)]


def decodes(slots: list[int], position: int, keep: int | None = None) -> list[StateScan]:
    """A row of each, of the last of which a state is kept."""
    keeps = [*[None] * (len(slots) - 1), keep]
    return [
        StateScan(row, row + 1, slot, position, kept) for row, (slot, kept) in enumerate(zip(slots, keeps, strict=True))
    ]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_go_on_as_packed_rows_do(kind):
    mixer, pool, other = mixer_of(kind), pool_of(kind), pool_of(kind)
    slots, there = ([begin(each, number) for number in range(3)] for each in (pool, other))
    keep, hidden = pool.allocate(cleared=False), torch.randn(2, 1, 4, 64)
    for position, rows in enumerate(hidden):
        some = slots[position:]  # the first does not go on
        recurrence = DecodeRecurrence(pool, decodes(some, position, keep if position else None), 4, pool.device)
        decoding = Recurrence(other, [[piece] for piece in decodes(there[position:], position)], other.device)
        out = recurrence.run(1, mixer, rows)
        assert torch.allclose(out[:, : len(some)], decoding.run(1, mixer, rows[:, : len(some)]), atol=1e-5)
        recurrence.finish()
        decoding.finish()
    pool.check_position(slots[0], 1)
    pool.check_position(keep, 2)
    assert pool.recurrent(ALL, keep).equal(pool.recurrent(ALL, slots[-1]))
    assert pool.conv(ALL, keep).equal(pool.conv(ALL, slots[-1]))
    for slot, state in zip(slots, there, strict=True):
        assert torch.allclose(pool.recurrent(1, slot), other.recurrent(1, state), atol=1e-5)
        assert torch.allclose(pool.conv(1, slot), other.conv(1, state), atol=1e-5)


@torch.no_grad()
def test_decodes_read_only_copied_inputs():
    """So a graph of one batch serves another one of as many rows."""
    mixer, pool, buffer = mixer_of(KINDS[0]), pool_of(KINDS[0]), torch.empty(1 << 16, dtype=torch.uint8)
    slots, hidden, made = [begin(pool, number) for number in range(4)], torch.randn(1, 2, 64), []
    for batch in (slots[:2], slots[:1], slots[2:]):
        transfer = TransferBatch(pool.device, buffer)
        made.append(DecodeRecurrence(pool, decodes(batch, 0), 2, pool.device, transfer.add))
        transfer.send()
    before = [pool.recurrent(1, slot).clone() for slot in slots]
    out = made[0].run(1, mixer, hidden)
    assert [pool.recurrent(1, slot).equal(was) for slot, was in zip(slots, before, strict=True)] == [True] * 2 + [
        False
    ] * 2
    alone = Recurrence(pool, [[piece] for piece in decodes([begin(pool, 2), begin(pool, 3)], 0)], pool.device)
    assert torch.allclose(out, alone.run(1, mixer, hidden), atol=1e-5)
