"""A scan of many sequences, in chunks or by kernels, is the recurrence, token by token, of each."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from spanlab.engine import scan as chunk_scan
from spanlab.engine.scan import ChunkScan, Kernels, KernelScan, ScanInputs, Segment

KEY, VALUE = 6, 5
CPU = torch.device("cpu")
LENGTHS = {
    "one row": [1],
    "one chunk": [32],
    "two chunks and a row": [65],
    "decodes": [1] * 5,
    "short": [3, 8, 2, 7, 8],
    "unequal": [1, 70, 9, 33, 2, 130, 64, 1],
    "many": [40] * 9,
}


def inputs_of(rows: int, key_heads: int, heads: int) -> ScanInputs:
    """Slow decay, so that states reach far."""
    draw = torch.Generator().manual_seed(rows)
    query, key = torch.randn(2, rows, key_heads, KEY, generator=draw)
    value = torch.randn(rows, heads, VALUE, generator=draw)
    g, beta = torch.rand(2, rows, heads, generator=draw)
    return ScanInputs(query, key, value, -0.1 * g, beta)


def token_by_token(inputs: ScanInputs, segment: Segment, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final state of one sequence, float64."""
    query, key, value, g, beta = (each[segment.start : segment.stops[-1]].double() for each in inputs)
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    query, key = (each.repeat_interleave(value.shape[1] // key.shape[1], dim=1) for each in (query, key))
    value, state, out = torch.nn.functional.pad(value, (0, state.shape[-1] - VALUE)), state.double(), []
    for q, k, v, decay, rate in zip(query, key, value, g.exp(), beta, strict=True):
        state = state * decay[:, None, None]
        wrong = v - (state * k[:, :, None]).sum(1)
        state = state + k[:, :, None] * (rate[:, None] * wrong)[:, None]
        out.append((state * q[:, :, None]).sum(1) * KEY**-0.5)
    return torch.stack(out)[..., :VALUE], state


def segments_of(lengths: Sequence[int]) -> list[Segment]:
    return [Segment(start, (stop,)) for start, stop in pairwise(accumulate(lengths, initial=0))]


def kernel(scan: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A scan of transformers as a kernel that keeps packed sequences apart."""

    def run(*tensors: Tensor, cu_seqlens: Tensor, initial_state: Tensor, g: Tensor, beta: Tensor, **rest: bool):
        states_at = []
        for (start, stop), state in zip(pairwise(cu_seqlens.tolist()), initial_state, strict=True):
            query, key, value, decay, rate = (each[:, start:stop] for each in (*tensors, g, beta))
            states_at.append(scan(query, key, value, g=decay, beta=rate, initial_state=state[None], **rest))
        return torch.cat([out for out, _ in states_at], dim=1), torch.cat([state for _, state in states_at])

    return run


def kernel_scan(segments: list[Segment], device: torch.device) -> KernelScan:
    module = modeling_qwen3_5
    scans = module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule
    return KernelScan(segments, device, Kernels(*(kernel(scan) for scan in scans)))


def ignore(segment: int, stop: int, state: Tensor) -> None:
    """Capture no state."""


@pytest.mark.parametrize("rows_at_once", [1, 40, 256])
@pytest.mark.parametrize("further", [0, KEY])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_sequence_is_its_recurrence(lengths, further, rows_at_once, monkeypatch):
    monkeypatch.setattr(chunk_scan, "_ROWS_AT_ONCE", rows_at_once)
    segments, heads = segments_of(lengths), 4
    inputs = inputs_of(sum(lengths), 2, heads)
    before = torch.randn(len(lengths), heads, KEY, VALUE + further, generator=torch.Generator().manual_seed(1))
    states, out = before.clone(), torch.full_like(inputs.value, torch.nan)
    ChunkScan(segments, CPU).run(inputs, states, out, ignore)
    for at, segment in enumerate(segments):
        outputs, state = token_by_token(inputs, segment, before[at])
        assert torch.allclose(out[segment.start : segment.stops[-1]].double(), outputs, atol=1e-5)
        assert torch.allclose(states[at].double(), state, atol=1e-5)


@pytest.mark.parametrize("scan", [ChunkScan, kernel_scan], ids=["in chunks", "by kernels"])
def test_states_are_reported_at_every_stop(scan):
    stops = (1, 33, 34, 64, 65, 150), (160, 200)
    segments = [Segment(150, stops[1]), Segment(0, stops[0])]
    inputs, states_at = inputs_of(200, 2, 4), {}
    before = torch.randn(2, 4, KEY, VALUE, generator=torch.Generator().manual_seed(1))
    states, out = before.clone(), torch.empty_like(inputs.value)
    plan = scan(segments, CPU)
    plan.run(inputs, states, out, lambda segment, stop, state: states_at.update({(segment, stop): state.clone()}))
    assert len(states_at) == len(stops[0]) + len(stops[1])
    for (at, number), state in states_at.items():
        segment_part = Segment(segments[at].start, (segments[at].stops[number],))
        outputs, expected = token_by_token(inputs, segment_part, before[at])
        assert torch.allclose(state.double(), expected, atol=1e-5)
        assert torch.allclose(out[segment_part.start : segment_part.stops[0]].double(), outputs, atol=1e-5)


def test_rows_of_no_segment_are_left_alone():
    inputs, segments = inputs_of(50, 4, 4), [Segment(30, (47,)), Segment(3, (10,))]
    out = torch.full_like(inputs.value, torch.nan)
    ChunkScan(segments, CPU).run(inputs, torch.zeros(2, 4, KEY, VALUE), out, ignore)
    is_written = torch.zeros(50, dtype=torch.bool)
    is_written[30:47] = is_written[3:10] = True
    assert (out.isfinite().all(-1).all(-1) == is_written).all()


def test_bfloat16_inputs_are_scanned_in_float32():
    inputs = ScanInputs(*(each.bfloat16() for each in inputs_of(40, 4, 4)))
    segment, states, out = Segment(0, (40,)), torch.zeros(1, 4, KEY, VALUE), torch.empty_like(inputs.value)
    ChunkScan([segment], CPU).run(inputs, states, out, ignore)
    outputs, state = token_by_token(inputs, segment, torch.zeros(4, KEY, VALUE))
    assert torch.allclose(states[0].double(), state, atol=1e-5)
    assert torch.equal(out, outputs.float().bfloat16()) or torch.allclose(out.double(), outputs, rtol=2**-7, atol=1e-6)
