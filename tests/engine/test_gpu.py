"""Every method on a CUDA device, by Triton, against the same run on the CPU."""

import pytest

from spanlab.core.admission import BatchRules

from .factories import arm, checkpoint, make_hybrid, make_small, nothing_leaks, questions, run
from .oracles import far
from .test_hybrid import GRID, crowd, fork

pytestmark = pytest.mark.gpu
ARMS = ["none", "radix", "pic", "pic_raw", "pic_turned", "lego_link_16", "cache_blend_15", "ape", "as_seen_blend_15"]


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", ARMS)
def test_a_run_has_the_outputs_of_the_cpu(name, block_size):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], (20, 5, 33), output=3, at=0)
    rules = BatchRules(max_num_batched_tokens=48, max_num_seqs=3)
    on_cpu, on_gpu = (
        run(make_small(device=device), arm(name, block_size), requests, rules=rules) for device in ("cpu", "cuda")
    )
    for request in requests:
        assert far(on_cpu.of(request), on_gpu.of(request)) < 1e-3
        assert on_cpu.records[request.id].reused_tokens == on_gpu.records[request.id].reused_tokens
    assert nothing_leaks(on_gpu)


@pytest.mark.parametrize("name", ["radix", "pic", "pic_raw", "pic_turned", "ape"])
def test_graphs_have_the_outputs_of_plain_decoding(name):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], (20, 5, 33), output=20, at=0)
    model, rules = make_small(device="cuda"), BatchRules(max_num_batched_tokens=64, max_num_seqs=3)
    plain, graphs = (run(model, arm(name, 16), requests, rules=rules, decode=decode) for decode in ("plain", "graphs"))
    assert all(far(plain.of(request), graphs.of(request)) < 1e-3 for request in requests)


@pytest.mark.parametrize("name", ["none", "pic", "pic_raw", "pic_turned", "ape", "cache_blend_15"])
def test_pieces_have_the_outputs_of_plain_prefills(name):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], (20, 5, 33), output=3, at=0)
    model, rules = make_small(device="cuda"), BatchRules(max_num_batched_tokens=96, max_num_seqs=3)
    plain, pieces = (
        run(model, arm(name, 16), requests, rules=rules, prefill=prefill) for prefill in ("plain", "graphs")
    )
    assert all(far(plain.of(request), pieces.of(request)) < 1e-3 for request in requests)


def test_hybrid_pieces_have_the_outputs_of_plain_prefills():
    requests, rules = crowd(20), BatchRules(max_num_batched_tokens=75, max_num_seqs=7)
    model = make_hybrid(device="cuda")
    plain, pieces = (
        run(model, checkpoint("block_64"), requests, rules=rules, prefill=each, decode=each)
        for each in ("plain", "graphs")
    )
    assert all(far(plain.of(request), pieces.of(request)) < 1e-3 for request in requests)


@pytest.mark.parametrize("name", ["none", "block_64"])
def test_hybrid_graphs_have_the_outputs_of_plain_decoding(name):
    requests, rules = crowd(20), BatchRules(max_num_batched_tokens=75, max_num_seqs=7)
    model = make_hybrid(device="cuda")
    plain, graphs = (run(model, checkpoint(name), requests, rules=rules, decode=each) for each in ("plain", "graphs"))
    assert all(far(plain.of(request), graphs.of(request)) < 1e-3 for request in requests)


@pytest.mark.parametrize("name", ["none", "block_64", "dp_3", "branch"])
def test_a_hybrid_has_the_outputs_of_the_cpu(name):
    """The scan is flash-linear-attention's where that is installed."""
    depths = [5 * GRID, 2 * GRID, 3 * GRID + 7]
    requests = [*crowd(12), *(fork(20 + at, depth, output=3) for at, depth in enumerate(depths))]
    rules = BatchRules(max_num_batched_tokens=75, max_num_seqs=4)
    on_cpu, on_gpu = (
        run(make_hybrid(device=device), checkpoint(name), requests, rules=rules) for device in ("cpu", "cuda")
    )
    for request in requests:
        assert far(on_cpu.of(request), on_gpu.of(request)) < 1e-3
        assert on_cpu.records[request.id].reused_tokens == on_gpu.records[request.id].reused_tokens
    assert nothing_leaks(on_gpu)
