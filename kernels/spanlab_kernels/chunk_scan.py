"""The gated delta rule from chunk to chunk: states advance over prepared chunks, and each chunk
gives its outputs.

A chunk of `width` rows with state S before it writes W = values - erase_keys S, gives queries S +
scores W, and leaves decay S + keys W. Chunks of a step belong to different sequences; chunk i of a
step is that of sequence i. So a step has at most as many chunks as the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab_kernels import uses_triton


class Chunks(NamedTuple):
    """Prepared chunks in the order of steps, float32 tensors [chunks, heads, …].

    `values`      [width, d_v], values that the chunk writes to an empty state
    `erase_keys`  [width, d_k], keys whose product with the previous state is subtracted from
                  `values`
    `queries`     [width, d_k], queries to the previous state
    `scores`      [width, width], queries times keys within the chunk
    `keys`        [d_k, width], keys of the written values, decayed to the end of the chunk
    `decay`       [1, 1], decay of the state over the chunk
    """

    values: Tensor
    erase_keys: Tensor
    queries: Tensor
    scores: Tensor
    keys: Tensor
    decay: Tensor


class Steps(NamedTuple):
    """The chunks of each step, and chunks whose final states are reported.

    `counts`    number of chunks of each step, not increasing
    `reported`  pairs (chunk, sequence) in the order of chunks
    `firsts`    int64 [steps], the first chunk of each step
    `lengths`   int64 [sequences], number of chunks of each sequence
    `reports`   int64 [chunks], the index in `reported`, or -1
    """

    counts: Sequence[int]
    reported: Sequence[tuple[int, int]]
    firsts: Tensor
    lengths: Tensor
    reports: Tensor


Report = Callable[[int, Tensor], None]
"""report(index, state [heads, d_k, d]): the state after a reported chunk; valid during the call."""


def scan(chunks: Chunks, steps: Steps, states: Tensor, report: Report) -> Tensor:
    """Advance `states`, float32 [sequences, heads, d_k, d], in place; return the outputs [chunks,
    heads, width, d_v].

    Values are zero in columns of `states` from d_v on, and outputs are not computed there.
    """
    return (scan_by_kernel if uses_triton(states) else scan_reference)(
        chunks, steps, states, report
    )


def scan_by_kernel(chunks: Chunks, steps: Steps, states: Tensor, report: Report) -> Tensor:
    """Scan in one launch, and report all states at the end; see `scan`."""
    from spanlab_kernels import chunk_kernels

    out, reported = chunk_kernels.scan(chunks, *steps[2:], len(steps.reported), states)
    for index, state in enumerate(reported):
        report(index, state)
    return out


def scan_reference(chunks: Chunks, steps: Steps, states: Tensor, report: Report) -> Tensor:
    """Scan in plain torch, in a few launches per step; see `scan`."""
    heads, outputs, first = states.shape[1], [], 0
    flat = Chunks(*(tensor.flatten(0, 1) for tensor in chunks))
    reported = iter([*enumerate(steps.reported), (-1, (-1, -1))])
    index, (chunk, sequence) = next(reported)
    for count in steps.counts:
        selected = slice(first * heads, (first + count) * heads)
        moving = states[:count].view(count * heads, *states.shape[2:])
        step = Chunks(*(tensor[selected] for tensor in flat))
        channels = step.values.shape[-1]
        written = torch.bmm(step.erase_keys, moving).neg_()
        written[..., :channels] += step.values
        output = torch.bmm(step.queries, moving[..., :channels])
        output.baddbmm_(step.scores, written[..., :channels])
        moving.mul_(step.decay).baddbmm_(step.keys, written)
        outputs.append(output)
        first += count
        while index >= 0 and chunk < first:
            report(index, states[sequence])
            index, (chunk, sequence) = next(reported)
    return torch.cat(outputs).view(-1, heads, *outputs[0].shape[1:])
