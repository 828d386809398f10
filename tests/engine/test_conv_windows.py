"""One convolution over packed rows equals separate convolutions of every sequence with its earlier inputs."""

import torch
from torch import Tensor

from spanlab.engine.recurrent import ConvRows, SlotRef, Windows
from spanlab.engine.slots import ALL, StatePool, StateShape

KERNEL, CHANNELS, LAYERS = 4, 5, 2
HELD = KERNEL - 1  # inputs that a slot holds
SHAPE = StateShape(LAYERS, 2, 3, 3, CHANNELS, KERNEL)
CPU = torch.device("cpu")
WEIGHT = torch.randn(CHANNELS, KERNEL, generator=torch.Generator().manual_seed(0))


def convolution(rows: Tensor, weight: Tensor) -> Tensor:
    """Outputs [1, channels, T], zeros before the first row."""
    padded = torch.nn.functional.pad(rows, (weight.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(padded, weight[:, None], groups=len(weight))


def pool_of(slots: int) -> StatePool:
    """Slots that hold something."""
    pool, draw = StatePool(SHAPE, torch.float32, "cpu"), torch.Generator().manual_seed(1)
    for slot in [pool.allocate() for _ in range(slots)]:
        pool.conv(ALL, slot).copy_(torch.randn(LAYERS, CHANNELS, HELD, generator=draw))
    return pool


def behind(before: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of rows [channels, T] after earlier inputs, and the last inputs afterwards."""
    inputs = torch.cat([before, rows], dim=1)
    return convolution(inputs[None], WEIGHT)[0, :, HELD:], inputs[:, -HELD:]


def test_sequences_are_kept_apart_and_their_last_inputs_kept():
    pool, windows = pool_of(5), Windows(KERNEL)
    first, second, third, copy, unused = (SlotRef(pool, slot) for slot in range(5))
    before = [pool.conv(1, slot).clone() for slot in range(5)]
    windows.scan(first, 2, 9)  # rows out of order
    windows.copy(first, copy)
    windows.scan(first, 9, 10)
    windows.clear(second)
    windows.scan(second, 0, 2)  # shorter than the kernel
    windows.copy(second, third)
    windows.scan(third, 10, 15)
    rows = torch.randn(1, CHANNELS, 15, generator=torch.Generator().manual_seed(2))
    out = ConvRows(windows, 15, CPU).convolve(1, convolution, rows, WEIGHT)
    expected, kept = behind(before[0], rows[0, :, 2:9])
    after, last = behind(kept, rows[0, :, 9:10])
    begun, short = behind(torch.zeros(CHANNELS, HELD), rows[0, :, :2])
    on, end = behind(short, rows[0, :, 10:])
    assert torch.allclose(out[0], torch.cat([begun, expected, after, on], dim=1), atol=1e-6)
    held = [pool.conv(1, place.slot) for place in (first, second, third, copy, unused)]
    assert all(torch.equal(*pair) for pair in zip(held, [last, short, end, kept, before[4]], strict=True))


def test_copies_without_rows_happen_in_all_layers():
    pool, windows = pool_of(3), Windows(KERNEL)
    before = [pool.conv(ALL, slot).clone() for slot in range(3)]
    first, second, third = (SlotRef(pool, slot) for slot in range(3))
    windows.copy(first, second)
    windows.copy(second, third)
    windows.clear(first)
    ConvRows(windows, 0, CPU).copy_windows(ALL)
    assert not pool.conv(ALL, 0).any()
    assert torch.equal(pool.conv(ALL, 1), before[0])
    assert torch.equal(pool.conv(ALL, 2), before[0])
    ConvRows(Windows(KERNEL), 0, CPU).copy_windows(ALL)
