"""A scan in chunks by the kernel is the gated delta rule, token by token, in float64."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from spanlab.engine import scan as engine_scan
from spanlab.engine.scan import ChunkScan, ScanInputs, Segment
from spanlab_kernels import chunk_kernels, chunk_scan
from spanlab_kernels.chunk_scan import Chunks, Steps

HEADS, KEY_HEADS = 4, 2
STOPS = {
    "one row": [(1,)],
    "short": [(8,), (3,), (1,)],
    "a chunk and a row": [(33,)],
    "stops inside and at chunks": [(1, 33, 34, 64, 65, 100), (40, 72)],
    "unequal": [(70,), (5, 9), (64,), (2,)],
}


@pytest.fixture(params=["reference", "kernel"])
def server(request, monkeypatch):
    found = {"reference": chunk_scan.scan_reference, "kernel": chunk_scan.scan_by_kernel}[request.param]
    monkeypatch.setattr(engine_scan, "scan", found)
    return found


def inputs_of(rows: int, key_dim: int, channels: int, device: str, dtype: torch.dtype = torch.float32) -> ScanInputs:
    """Slow decay, so that states reach far."""
    draw = torch.Generator().manual_seed(rows)
    query, key = torch.randn(2, rows, KEY_HEADS, key_dim, generator=draw)
    value = torch.randn(rows, HEADS, channels, generator=draw)
    g, beta = torch.rand(2, rows, HEADS, generator=draw)
    return ScanInputs(*(each.to(device, dtype) for each in (query, key, value, -0.1 * g, beta)))


def recurrence(inputs: ScanInputs, start: int, stop: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final state of rows [start, stop), float64 on the CPU."""
    query, key, value, g, beta = (each[start:stop].cpu().double() for each in inputs)
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    query, key = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (query, key))
    value = torch.nn.functional.pad(value, (0, state.shape[-1] - value.shape[-1]))
    state, out = state.cpu().double(), []
    for q, k, v, decay, rate in zip(query, key, value, g.exp(), beta, strict=True):
        state = state * decay[:, None, None]
        wrong = v - torch.einsum("hkd,hk->hd", state, k)
        state = state + torch.einsum("hk,hd->hkd", k, rate[:, None] * wrong)
        out.append(torch.einsum("hkd,hk->hd", state, q) * query.shape[-1] ** -0.5)
    return torch.stack(out)[..., : inputs.value.shape[-1]], state


@pytest.mark.parametrize(("key_dim", "channels", "further"), [(6, 5, 0), (6, 5, 6), (16, 20, 0)])
@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_outputs_and_states_at_every_stop(server, stops, key_dim, channels, further, device):
    check(stops, key_dim, channels, further, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sizes_of_a_model(server):
    check([(64, 128, 500, 512), (300,)], 128, 128, 0, "cuda")


def check(stops: list[tuple[int, ...]], key_dim: int, channels: int, further: int, device: str) -> None:
    starts = [0, *accumulate(each[-1] for each in stops)]
    segments = [
        Segment(start, tuple(start + stop for stop in each)) for start, each in zip(starts, stops, strict=False)
    ]
    inputs = inputs_of(starts[-1], key_dim, channels, device)
    before = torch.randn(len(stops), HEADS, key_dim, channels + further, generator=torch.Generator().manual_seed(1))
    states, found = before.clone().to(device), {}
    out = torch.full_like(inputs.value, torch.nan)

    def on_stop(segment: int, stop: int, state: Tensor) -> None:
        found[segment, stop] = state.cpu().clone()

    ChunkScan(segments, states.device).run(inputs, states, out, on_stop)
    atol = 1e-5 if device == "cpu" else 1e-4  # three products of TF32 are a little less exact than one of float32
    assert len(found) == sum(map(len, stops))
    for index, segment in enumerate(segments):
        state = before[index]
        for number, (start, stop) in enumerate(pairwise((segment.start, *segment.stops))):
            outputs, state = recurrence(inputs, start, stop, state)
            assert torch.allclose(out[start:stop].cpu().double(), outputs, atol=atol)
            assert torch.allclose(found[index, number].double(), state, atol=atol)
        assert torch.allclose(states[index].cpu().double(), state, atol=atol)


def test_the_kernel_is_launched_once_for_all_chunks(monkeypatch, device):
    launches = []
    kernel = chunk_kernels._scan

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(chunk_kernels, "_scan", Counted())
    monkeypatch.setattr(engine_scan, "scan", chunk_scan.scan_by_kernel)
    segments, inputs = [Segment(0, (64, 90)), Segment(90, (100,))], inputs_of(100, 6, 5, device)
    states = torch.zeros(2, HEADS, 6, 5, device=device)
    ChunkScan(segments, states.device).run(inputs, states, torch.empty_like(inputs.value), lambda *given: None)
    assert launches == [(2 * HEADS, 1)]


def test_a_report_is_that_of_its_chunk(device):
    """A state that only decays: 2 after one chunk, 4 after two."""
    chunks, width, key_dim = 3, 2, 4
    zeros = [torch.zeros(chunks, 1, *size, device=device) for size in ((2, 3), (2, 4), (2, 4), (2, 2), (4, 2))]
    prepared = Chunks(*zeros, torch.full((chunks, 1, 1, 1), 2.0, device=device))
    numbers = [torch.tensor(values, device=device) for values in ([0, 2], [2, 1], [-1, 0, 1])]
    steps, found = Steps([2, 1], [(1, 1), (2, 0)], *numbers), {}
    for scan in (chunk_scan.scan_reference, chunk_scan.scan_by_kernel):
        states = torch.ones(2, 1, key_dim, 3, device=device)
        out = scan(prepared, steps, states, lambda index, state: found.update({index: float(state.unique())}))
        assert found == {0: 2.0, 1: 4.0} and states.flatten(1).amax(1).tolist() == [4.0, 2.0]
        assert out.shape == (chunks, 1, width, 3) and not out.any()
