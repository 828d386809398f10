"""Forwards in pieces equal plain ones: pieces read and write fixed addresses, and nothing runs at a capture."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spanlab.core.admission import BatchRules
from spanlab.engine import model
from spanlab.engine.model import ROWS, Pieces
from spanlab.engine.settings import EngineSettings

from .factories import (
    arm,
    checkpoint,
    hybrid_pic,
    make_hybrid,
    make_slow_hybrid,
    make_small,
    nothing_leaks,
    questions,
    start,
)
from .factories import run as run_plain
from .oracles import far
from .test_hybrid import crowd

LENGTHS = (20, 5, 33)
RULES = BatchRules(max_num_batched_tokens=96, max_num_seqs=3)


class OperationRecorder(TorchDispatchMode):
    """Records operations on the CPU, and repeats them into the tensors of the first time, as a graph of CUDA does.

    While it records, new tensors are filled with NaN where they have room for it: a capture computes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.replayed = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self._operations = []
        self.__enter__()

    def end(self):
        self.__exit__(None, None, None)
        operations = self._operations

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, made in operations:
                results = _tensors(func(*args, **kwargs))
                for target, source in zip(made, results[: len(made)], strict=True):
                    target.copy_(source)

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, list(kwargs.values())))}
        made = _tensors(result)
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "a capture reads a number"
        if func._schema.is_mutable:
            self._operations.append((func, args, kwargs, []))
        elif not any(tensor.untyped_storage().data_ptr() in given for tensor in made):
            self._operations.append((func, args, kwargs, made))
            for tensor in made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def recorded(monkeypatch) -> Iterator[OperationRecorder]:
    """Pieces are recorded on the CPU, of up to two numbers of rows."""
    recorder = OperationRecorder()
    monkeypatch.setattr(model, "GraphRecorder", lambda: recorder)
    monkeypatch.setattr(model, "LARGEST", 2 * ROWS)
    monkeypatch.setattr("spanlab.engine.engine.LARGEST", 2 * ROWS)
    model._SHARED.clear()
    yield recorder
    model._SHARED.clear()


def both(recorded, model, strategy, requests, **options):
    """A plain run, and one in pieces with the same logits up to rounding."""
    plain = run_plain(model, strategy, requests, **options)
    result = start(model, strategy, requests, prefill="graphs", **options).serve(requests)
    assert plain.engine.outputs == result.engine.outputs
    assert all(far(plain.of(request), result.of(request)) < 2e-5 for request in requests)
    assert nothing_leaks(result)
    return result


def test_a_number_of_rows_is_captured_once(recorded, monkeypatch):
    captured = []
    capture = Pieces._capture
    monkeypatch.setattr(Pieces, "_capture", lambda self, *size: captured.append(size) or capture(self, *size))
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=6, at=0)
    both(recorded, make_small(layers=2), arm("pic", 16), requests, rules=RULES)
    assert captured[:2] == [(64, 1), (128, 1)] and len(captured) == len(set(captured))
    assert {chosen for _, chosen in captured} == {1, 4}, "three rows of logits are padded to four"
    assert recorded.replayed > 10


def test_pieces_are_refused_on_a_processor():
    with pytest.raises(ValueError, match=r"^engine\.prefill=graphs with engine\.device=cpu: expected plain$"):
        EngineSettings(prefill="graphs", device="cpu")


@pytest.mark.parametrize(
    "name", ["none", "radix", "pic", "pic_raw", "pic_turned", "lego_link_16", "ape", "cache_blend_15"]
)
def test_logits_in_pieces_are_those_of_plain_forwards(recorded, name):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=6, at=0)
    both(recorded, make_small(layers=2), arm(name, 16), requests, rules=RULES)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_logits_of_a_hybrid_resumed_from_checkpoints(recorded, kind):
    both(recorded, make_hybrid(kind, layers=2), checkpoint("block_64"), crowd(12), rules=BatchRules(75, 7))


def test_logits_of_a_hybrid_whose_spans_are_composed(recorded):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], LENGTHS, output=6, at=0)
    both(recorded, make_slow_hybrid(), hybrid_pic(block_size=16), requests, rules=RULES)


def test_larger_steps_are_launched_plainly(recorded):
    requests = questions([(0, 1), (1, 0)], (100, 90))
    both(recorded, make_small(layers=2), arm("none", 16), requests, rules=BatchRules(4096, 1))
    assert recorded.replayed == 0
