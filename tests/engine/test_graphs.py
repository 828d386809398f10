"""Decoding in padded batches says what plain decoding says, and is fit to be captured once and replayed."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from spanlab.core.batch_rules import BatchRules
from spanlab.engine import attention_metadata
from spanlab.engine.decode_rows import DecodeRows
from spanlab.engine.graphs import CudaGraphs, Padded, PaddedRows
from spanlab.engine.settings import EngineSettings

from .factories import arm, make_small, questions, run, start
from .fake_device import fake_device, on_device
from .oracles import far
from .test_device_discipline import check, cold_and_warm, make_engine, serve_on

LENGTHS = (20, 5, 33)
RULES = BatchRules(max_num_batched_tokens=64, max_num_seqs=3)  # which is padded to 4
ARMS = ("radix", "pic", "pic_raw", "pic_turned", "lego_link_16", "ape")


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", ARMS)
def test_padded_logits_are_those_of_plain_decoding(name, block_size):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=6, at=0)
    plain, padded = (
        run(make_small(), arm(name, block_size), requests, rules=RULES, decode=decode) for decode in ("plain", "padded")
    )
    assert plain.engine.outputs == padded.engine.outputs
    assert all(far(plain.of(request), padded.of(request)) < 2e-5 for request in requests)
    pool, stored = padded.engine.pool, padded.stored
    assert pool.free_pages + len(stored) + 1 == pool.shape.pages  # one is the decoder's


def test_rows_and_spans_are_padded_to_powers_of_two(monkeypatch):
    sizes = set()
    made = PaddedRows.__init__

    def noted(rows, tails: DecodeRows, *more):
        made(rows, tails, *more)
        assert len(rows.slots) >= len(tails.slots) and len(rows.independent) == len(rows.groups.of_span.index)
        sizes.add((len(tails.slots), len(rows.slots), len(rows.independent)))

    monkeypatch.setattr(PaddedRows, "__init__", noted)
    run(make_small(), arm("pic"), questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=3), rules=RULES, decode="padded")
    requests = questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=3, at=0)
    run(make_small(), arm("pic"), requests, rules=RULES, decode="padded")
    assert sizes == {(1, 1, 4), (2, 2, 8), (3, 4, 16)}  # a head, two documents and a question each


def test_equal_keys_have_equal_addresses(monkeypatch):
    """What a graph was captured with is where a later step of the same key finds its numbers."""
    seen, at = defaultdict(set), []
    attend = attention_metadata.attend

    def noted(query, keys, values, batch, **rest):
        at[:] = [getattr(batch, field.name) for field in fields(batch)]
        return attend(query, keys, values, batch, **rest)

    def replay(key, work):
        logits = work()
        seen[key].add(tuple(value.data_ptr() for value in at if isinstance(value, torch.Tensor) and len(value)))
        return logits

    monkeypatch.setattr(attention_metadata, "attend", noted)
    requests = questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=40, at=0)
    done = start(make_small(), arm("pic", 16), requests, rules=RULES, decode="padded")
    assert isinstance(done.engine._decoder, Padded)
    done.engine._decoder._replay = replay
    done.serve(requests)
    assert {len(addresses) for addresses in seen.values()} == {1}
    assert len(seen) <= 3  # limits of keys and positions double at most once each


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_what_is_captured_neither_waits_nor_copies():
    """A wait or a copy from the host within a capture is an error of CUDA."""
    requests, inside = cold_and_warm(), []
    with fake_device() as device:
        engine = make_engine(on_device(make_small()), arm("pic"), requests, decode="padded")

        def replay(key, work):
            before = len(device.waits), device.copies
            logits = work()
            inside.append((len(device.waits), device.copies) == before)
            return logits

        engine._decoder._replay = replay
        steps = serve_on(device, engine, requests)
    check(steps)
    assert inside and all(inside)
    assert all(step.copies == 1 for step in steps if not step.chunks)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_graph_lists_the_tiles_of_its_replays(monkeypatch):
    """Tiles that were listed before a capture would be read by all replays, whatever their spans are."""
    requests, inside = cold_and_warm(), []
    with fake_device() as device:
        engine = make_engine(on_device(make_small()), arm("pic"), requests, decode="padded")

        @contextmanager
        def graph(captured, pool):
            before = Counter(device.kernels)
            yield
            inside.append(Counter(device.kernels) - before)

        stream = SimpleNamespace(wait_stream=lambda other: None)
        stand_ins = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph_pool_handle": lambda: None,
            "current_stream": lambda: stream,
            "Stream": lambda: stream,
            "stream": lambda beside: nullcontext(),
            "graph": graph,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        engine._decoder._replay = CudaGraphs()
        serve_on(device, engine, requests)
    assert inside and all(launched["_count_tiles"] == launched["_count_work"] == 1 for launched in inside)


def test_graphs_are_refused_on_a_processor():
    with pytest.raises(ValueError, match=r"^engine\.decode=graphs with engine\.device=cpu: expected plain or padded$"):
        EngineSettings(decode="graphs", device="cpu")
