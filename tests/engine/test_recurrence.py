"""Recurrent layers run once over the rows of a batch, whatever sequences and captures it has."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from spanlab.engine.recurrent import MIXER, Piece, Recurrence
from spanlab.engine.state_pool import StatePool

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
    """A slot with a state of its own."""
    slot, draw = pool.take(), torch.Generator().manual_seed(number)
    for part in (pool.recurrent(1, slot), pool.conv(1, slot)):
        part.copy_(torch.randn(part.shape, generator=draw))
    return slot


def sequence(pool: StatePool, number: int, first: int) -> list[Piece]:
    slot, edges = begin(pool, number), [0, *CUTS.get(number, ()), LENGTHS[number]]
    keeps = [pool.take() if stop < LENGTHS[number] else None for stop in edges[1:]]
    return [
        Piece(first + start, first + stop, slot, start, keep)
        for (start, stop), keep in zip(pairwise(edges), keeps, strict=True)
    ]


def states_of(pool: StatePool, pieces: list[Piece]) -> list[Tensor]:
    slots = [piece.keep for piece in pieces[:-1]] + [pieces[-1].slot]
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
    together.done()
    for number, (start, stop) in enumerate(pairwise(starts)):
        alone = sequence(pool, number, 0)
        recurrence = Recurrence(pool, [alone], pool.device)
        assert torch.allclose(recurrence.run(1, mixer, hidden[:, start:stop]), out[:, start:stop], atol=1e-5)
        recurrence.done()
        for own, other in zip(states_of(pool, alone), states_of(pool, packed[number]), strict=True):
            assert torch.allclose(own, other, atol=1e-5)


@torch.no_grad()
def test_a_mixer_runs_once_whatever_is_packed_and_kept(monkeypatch):
    mixer, pool = mixer_of(KINDS[0]), pool_of(KINDS[0])
    projected, project = [], mixer.out_proj.forward
    monkeypatch.setattr(mixer.out_proj, "forward", lambda rows: projected.append(rows.shape) or project(rows))
    starts = list(accumulate(LENGTHS, initial=0))
    packed = [sequence(pool, number, starts[number]) for number in range(len(LENGTHS))]
    Recurrence(pool, packed, pool.device).run(1, mixer, torch.randn(1, sum(LENGTHS), 64))
    assert [shape[1] for shape in projected] == [sum(LENGTHS)]


@torch.no_grad()
def test_a_next_decode_is_planned_again_only_if_it_differs():
    mixer, pool = mixer_of(KINDS[0]), pool_of(KINDS[0])
    slots, hidden = [begin(pool, number) for number in range(3)], torch.randn(2, 1, 3, 64)
    decodes = [[Piece(row, row + 1, slot, 0)] for row, slot in enumerate(slots)]
    first = Recurrence(pool, decodes, pool.device)
    first.run(1, mixer, hidden[0])
    first.done()
    next_decodes = [[Piece(row, row + 1, slot, 1)] for row, slot in enumerate(slots)]
    assert first.again(next_decodes[:2]) is None
    assert first.again([*next_decodes[:2], [Piece(2, 3, slots[2], 1, pool.take())]]) is None
    second = first.again(next_decodes)
    out = second.run(1, mixer, hidden[1])
    second.done()
    for number, slot in enumerate(slots):
        pool.expect(slot, 2)
        alone = Recurrence(pool, [[Piece(0, 2, begin(pool, number), 0)]], pool.device)
        assert torch.allclose(alone.run(1, mixer, hidden[:, 0, number][None])[0, 1], out[0, number], atol=1e-5)
