"""Measure the fastest sizes of the attention kernel on this machine's card, and store them.

    python -m spanlab_kernels.attention.tune --head-dim 128 [--dtype bfloat16] [--heads 32] [--kv-heads 8]

The engine never tunes while it runs: a compilation would count as time of a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from spanlab_kernels.attention import attend
from spanlab_kernels.attention import triton as launcher
from spanlab_kernels.attention.batch import Group, Span, span_batch
from spanlab_kernels.attention.kernel import (
    LARGEST,
    Blocks,
    blocks,
    cache_file,
    save_choices,
    variant,
)
from spanlab_kernels.blocks import angle_table
from spanlab_kernels.testing import inverse_powers

KEYS, SPAN, PAGE = 8192, 500, 16
ROUNDS = 20
ROWS = (1, 8, 16, 64)
"""Rows of a group; the first number is that of decoding."""


def candidates(fixed: Blocks) -> Iterator[Blocks]:
    """The fixed sizes, then variations of keys per tile and tiles in flight, and 64 rows on half
    the warps."""
    yield fixed
    for n in (32, 64, 128):
        for stages in (2, 3, 4):
            if (n, stages) != (fixed.n, fixed.stages):
                yield replace(fixed, n=n, stages=stages)
    if fixed.m == LARGEST:
        yield from (replace(fixed, m=64, warps=4, stages=stages) for stages in (2, 3))


def fastest(sizes: Iterator[Blocks], seconds: Callable[[Blocks], float]) -> Blocks:
    """The sizes of the least time, without those that exceed the card's resources; the first must
    not exceed them."""
    times = {}
    for size in sizes:
        try:
            times[size] = seconds(size)
        except (
            Exception
        ) as error:  # Triton's OutOfResources, which moves between modules of the package
            if not times or "OutOfResources" not in type(error).__name__:
                raise
    return min(times, key=times.__getitem__)


def tune(
    head_dim: int, dtype: torch.dtype, heads: int, kv_heads: int, device: torch.device
) -> dict[str, Blocks]:
    """The fastest sizes by variant, for form QR over spans of `SPAN` keys, on a CUDA device."""
    tuned = {}
    for rows in ROWS:
        entries = rows * heads // kv_heads
        call = _call(rows, head_dim, dtype, heads, kv_heads, device)
        name = variant(head_dim, dtype, entries)
        if name not in tuned:
            tuned[name] = fastest(
                candidates(blocks(head_dim, dtype, entries)),
                lambda size, call=call: _time(call, size),
            )
    return tuned


def _call(
    rows: int, head_dim: int, dtype: torch.dtype, heads: int, kv_heads: int, device: torch.device
) -> Callable[[], object]:
    starts = range(0, KEYS, SPAN)
    page_ids = iter(range(KEYS // PAGE + 2 * len(starts)))
    lengths = [min(SPAN, KEYS - start) for start in starts]
    spans = [
        Span(start, length, start, [next(page_ids) for _ in range(-(-length // PAGE))])
        for start, length in zip(starts, lengths, strict=True)
    ]
    count = max(spans[-1].pages) + 1
    batch = span_batch([Group(range(KEYS - rows, KEYS), spans)], device, page_size=PAGE)
    query = torch.randn(rows, heads, head_dim, device=device).to(dtype)
    keys, values = (
        torch.randn(count, PAGE, kv_heads, head_dim, device=device).to(dtype) for _ in "kv"
    )
    table = angle_table(inverse_powers(head_dim), KEYS + 1, device)
    return lambda: attend(query, keys, values, batch, form="QR", table=table, scale=head_dim**-0.5)


def _time(call: Callable[[], object], size: Blocks) -> float:
    """Median milliseconds of a call with these sizes, by CUDA events, after one that compiles."""
    original = launcher.blocks
    launcher.blocks = lambda *_: size
    try:
        call()
        times = []
        for _ in range(ROUNDS):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(float(started.elapsed_time(ended)))
        return statistics.median(times)
    finally:
        launcher.blocks = original


def main() -> None:
    """Tune, store and print the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not tuned: no CUDA device")
        return
    device = torch.device("cuda")
    tuned = tune(
        options.head_dim, getattr(torch, options.dtype), options.heads, options.kv_heads, device
    )
    save_choices(torch.cuda.get_device_name(device), tuned, cache_file())
    for name, size in tuned.items():
        print(f"{name}: {size}")
    print(f"kept in {cache_file()}")


if __name__ == "__main__":
    main()
