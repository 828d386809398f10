"""Decoding in padded batches equals plain decoding, and can be captured once and replayed."""

import sys
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.engine import engine
from spanlab.engine import rows as attention_metadata
from spanlab.engine.engine import CudaGraphs, Padded
from spanlab.engine.recurrent import DecodeRecurrence
from spanlab.engine.rows import TailRows
from spanlab.engine.settings import EngineSettings
from spanlab.engine.slots import PADDING_ROW

from ..support.products import in_turn
from .composed import worst
from .factories import (
    arm,
    checkpoint,
    hybrid_pic,
    least_budget,
    make_hybrid,
    make_slow_hybrid,
    make_small,
    nothing_leaks,
    questions,
    run,
    start,
)
from .fake_device import fake_device, on_device
from .oracles import far
from .test_decode_states import turns
from .test_device_discipline import check, cold_and_warm, forks, make_engine, one_of_each, serve_on
from .test_hybrid import crowd, off

LENGTHS = (20, 5, 33)
RULES = BatchRules(max_num_batched_tokens=64, max_num_seqs=3)  # which is padded to 4
ARMS = ("radix", "pic", "pic_raw", "pic_turned", "lego_link_16", "ape")


def shallow():
    """A model of two layers: what is captured of one layer is captured of every other."""
    return make_small(layers=2)


CASES = {  # on a device that is not there: model, arm, requests
    "attention": (shallow, lambda: arm("pic"), cold_and_warm),
    "states": (one_of_each, lambda: checkpoint("block_64"), forks),
    "maps": (one_of_each, hybrid_pic, cold_and_warm),
}


@pytest.mark.parametrize(("name", "block_size"), in_turn(ARMS, (1, 16)))
def test_padded_logits_are_those_of_plain_decoding(name, block_size):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=6, at=0)
    both(make_small(layers=2), arm(name, block_size), requests, rules=RULES)


def both(model, strategy, requests: list[Request], **options):
    """Plain and padded runs with equal outputs, and logits that differ only by rounding."""
    plain, padded = (run(model, strategy, requests, decode=decode, **options) for decode in ("plain", "padded"))
    assert plain.engine.outputs == padded.engine.outputs
    assert all(far(plain.of(request), padded.of(request)) < 2e-5 for request in requests)
    padded.engine.pool.free(padded.engine._forwards._decoder._spare.ids)
    assert nothing_leaks(padded)
    return padded


@pytest.mark.parametrize(
    ("name", "kind"), in_turn(("none", "block_64", "dp_3", "branch"), ("qwen3_5_text", "qwen3_next"))
)
def test_padded_logits_of_a_hybrid_resumed_from_checkpoints(kind, name):
    requests, rules = crowd(6), BatchRules(max_num_batched_tokens=75, max_num_seqs=7)
    result = both(make_hybrid(kind, layers=2), checkpoint(name), requests, rules=rules)
    assert off(result, *requests) < 1e-5


def test_padded_logits_of_a_hybrid_that_is_preempted():
    requests, strategy, model = crowd(40, longest=100, apart_ns=0), checkpoint("block_64"), make_hybrid(layers=2)
    budget = least_budget(model, strategy, requests)
    result = both(model, strategy, requests, rules=BatchRules(75, 7), budget=budget, states=6)
    assert result.rows[0].preemptions > 0
    assert off(result, *requests) < 1e-5


@pytest.mark.parametrize("repaired", [0, 3])
def test_padded_logits_of_a_hybrid_whose_spans_are_composed(repaired):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=6, at=0)
    result = both(make_slow_hybrid(), hybrid_pic(block_size=16, repaired=repaired), requests, rules=RULES)
    assert repaired or worst(result, requests) < 1e-5


def test_states_are_kept_while_a_padded_batch_decodes():
    strategy = checkpoint("last")
    strategy.placement.kind, strategy.placement.also, strategy.placement.interval = "decode_interval", ["last"], 64
    requests = turns(at_once=False)
    result = both(make_hybrid(layers=2), strategy, requests)
    assert result.records[1].reused_tokens == 192
    assert off(result, requests[1]) < 1e-5


def test_outputs_do_not_depend_on_the_unused_state():
    requests, rules = crowd(12), BatchRules(max_num_batched_tokens=75, max_num_seqs=7)
    result = start(make_hybrid(layers=2), checkpoint("block_64"), requests, rules=rules, decode="padded")
    for tensor in result.engine.memory.states.pool.slab.row(PADDING_ROW).values():
        tensor.fill_(torch.nan)
    result.serve(requests)
    assert off(result, *requests) < 1e-5


def forget_plans() -> None:
    """What attention on a CPU has worked out of numbers, a graph works out again on the device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("spanlab_kernels.attention"):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


@pytest.mark.parametrize(
    ("model", "strategy"),
    [(shallow, arm("pic", 16)), (one_of_each, checkpoint("block_64")), (make_slow_hybrid, hybrid_pic(block_size=16))],
    ids=CASES,
)
def test_first_work_of_a_key_serves_all_later_steps(model, strategy):
    """A graph repeats the captured operations on the present content of the same addresses."""
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=40, at=10**7)  # 1, 2, 3, 2 and 1 running
    first, used = {}, Counter()

    def replay(key, work):
        forget_plans()
        used[key] += 1
        return first.setdefault(key, work)()

    plain = run(model(), strategy, requests, rules=RULES)
    result = start(model(), strategy, requests, rules=RULES, decode="padded")
    result.engine._forwards._decoder._replay = replay
    result.serve(requests)
    assert all(far(plain.of(request), result.of(request)) < 2e-5 for request in requests)
    assert max(used.values()) > 10


def test_rows_and_spans_are_padded_to_powers_of_two(monkeypatch):
    sizes = set()
    pad = engine.pad_rows

    def noted(tails: TailRows, *more):
        rows = pad(tails, *more)
        assert len(rows.slots) >= len(tails.slots) and len(rows.independent) == len(rows.groups.of_span.index)
        sizes.add((len(tails.slots), len(rows.slots), len(rows.independent)))
        return rows

    monkeypatch.setattr(engine, "pad_rows", noted)
    run(
        make_small(layers=2),
        arm("pic"),
        questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=3),
        rules=RULES,
        decode="padded",
    )
    requests = questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=3, at=0)
    run(make_small(layers=2), arm("pic"), requests, rules=RULES, decode="padded")
    assert sizes == {(1, 1, 4), (2, 2, 8), (3, 4, 16)}  # a head, two documents and a question each


@pytest.mark.parametrize("apart_ns", [0, 10**7], ids=["at once", "one after another"])
@pytest.mark.parametrize(
    ("model", "strategy"), [(shallow, arm("pic", 16)), (one_of_each, checkpoint("none"))], ids=["attention", "hybrid"]
)
def test_equal_keys_have_equal_addresses(model, strategy, apart_ns, monkeypatch):
    """A later step of the same key uses the buffers of the capture."""
    seen, at, states = defaultdict(set), [], []
    attend, scan = attention_metadata.attend, DecodeRecurrence.scan

    def noted(query, keys, values, batch, **rest):
        at[:] = [getattr(batch, field.name) for field in fields(batch)]
        return attend(query, keys, values, batch, **rest)

    def scanned(recurrence, *given):
        states[:] = [recurrence._slab_rows, *recurrence._pool.slab.row(PADDING_ROW).values()]
        return scan(recurrence, *given)

    def replay(key, work):
        logits = work()
        places = [value for value in (*at, *states) if isinstance(value, torch.Tensor) and len(value)]
        seen[key].add(tuple(value.data_ptr() for value in places))
        return logits

    monkeypatch.setattr(attention_metadata, "attend", noted)
    monkeypatch.setattr(DecodeRecurrence, "scan", scanned)
    requests = questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=40, at=apart_ns)
    result = start(model(), strategy, requests, rules=RULES, decode="padded")
    assert isinstance(result.engine._forwards._decoder, Padded)
    result.engine._forwards._decoder._replay = replay
    result.serve(requests)
    assert {len(addresses) for addresses in seen.values()} == {1}
    counts = Counter((size, moved) for size, (_, moved) in seen)
    assert max(counts.values()) <= 4  # limits of keys, of all keys and of positions double at most once each


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("case", CASES)
def test_what_is_captured_neither_waits_nor_copies(case):
    """A wait or a copy from the host within a capture is an error of CUDA."""
    model, strategy, requests = (make() for make in CASES[case])
    inside = []
    with fake_device() as device:
        engine = make_engine(on_device(model), strategy, requests, decode="padded")

        def replay(key, work):
            before = len(device.waits), device.copies
            logits = work()
            inside.append((len(device.waits), device.copies) == before)
            return logits

        engine._forwards._decoder._replay = replay
        steps = serve_on(device, engine, requests)
    check(steps)
    assert inside and all(inside)
    assert all(step.copies == 1 for step in steps if not step.chunks)


def stand_in_for_graphs(monkeypatch, graph) -> list[object]:
    """Replacements for torch's CUDA graph functions, without a device; returns the replayed graphs."""
    stream, replayed = SimpleNamespace(wait_stream=lambda other: None), []

    def captured():
        made = SimpleNamespace(replay=lambda: replayed.append(made))
        return made

    stand_ins = {
        "CUDAGraph": captured,
        "graph_pool_handle": lambda: None,
        "current_stream": lambda: stream,
        "Stream": lambda: stream,
        "stream": lambda beside: nullcontext(),
        "graph": graph,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return replayed


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("case", CASES)
def test_a_graph_lists_the_tiles_of_its_replays(case, monkeypatch):
    """Tiles that are listed before a capture would be read by all replays, also with other spans."""
    model, strategy, requests = (make() for make in CASES[case])
    inside = []
    with fake_device() as device:

        @contextmanager
        def graph(captured, pool):
            before = Counter(device.kernels)
            yield
            inside.append(Counter(device.kernels) - before)

        stand_in_for_graphs(monkeypatch, graph)
        serve_on(device, make_engine(on_device(model), strategy, requests, decode="graphs"), requests)
    assert inside and all(launched["_count_tiles"] == launched["_count_work"] == 1 for launched in inside)


def test_work_is_done_once_for_each_call(monkeypatch):
    """It moves states on, and a capture moves nothing."""
    result, capturing = [], []

    @contextmanager
    def graph(captured, pool):
        capturing.append(True)
        yield
        capturing.pop()

    def work():
        result.append("captured" if capturing else "done")
        return torch.zeros(1)

    replayed = stand_in_for_graphs(monkeypatch, graph)
    graphs = CudaGraphs()
    for _ in range(3):
        graphs("key", work)
    assert result == ["done", "captured"] and len(replayed) == 2


def test_graphs_are_refused_on_a_processor():
    with pytest.raises(ValueError, match=r"^engine\.decode=graphs with engine\.device=cpu: expected plain or padded$"):
        EngineSettings(decode="graphs", device="cpu")
