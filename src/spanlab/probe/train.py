"""Training of the probe: one loop, in which the questions of a step read all of the documents or a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.analysis.recall import TrainingPoint
from spanlab.engine.affine import exact
from spanlab.probe.memory import ask, encode_apart, read_through
from spanlab.probe.task import Batch, Shape, draw
from spanlab.settings.probe import TrainProbe


def train(model: PreTrainedModel, settings: TrainProbe) -> Iterator[TrainingPoint]:
    """Train in place; yields a point per way of reading every `every` steps."""
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    seen: dict[str, list[tuple[float, float]]] = {}
    for step in range(1, settings.steps + 1):
        read = _drawn(rng, settings)
        loss, accuracy = _forward(model, _batch(rng, step, settings), read)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        seen.setdefault(read, []).append((float(loss.detach()), accuracy))
        if step % settings.every == 0 or step == settings.steps:
            yield from (_point(step, read, values) for read, values in seen.items())
            seen.clear()


def _point(step: int, read: str, values: list[tuple[float, float]]) -> TrainingPoint:
    loss, accuracy = np.mean(values, axis=0)
    return TrainingPoint(step, read, len(values), float(loss), float(accuracy))


def _rate(step: int, settings: TrainProbe) -> float:
    """The learning rate's share of its highest: up, flat, down along a cosine."""
    rise, fall = settings.warm_up * settings.steps, settings.decay * settings.steps
    left = (settings.steps - step) / fall if fall else 1.0
    return min(1.0, (step + 1) / (rise + 1)) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, left)))


def _drawn(rng: np.random.Generator, settings: TrainProbe) -> str:
    """What the questions of a step read."""
    shares = {"no KV": settings.hidden_kv, "spans": settings.isolated, "spans, no state": settings.empty_state}
    shares["all"] = 1 - sum(shares.values())
    return str(rng.choice(list(shares), p=list(shares.values())))


def _batch(rng: np.random.Generator, step: int, settings: TrainProbe) -> Batch:
    """Sequences of one shape; documents become more and longer while the curriculum lasts."""
    rise = settings.curriculum * settings.steps
    share = min(1.0, step / rise) if rise else 1.0
    most = 1 + int(share * (settings.documents - 1))
    longest = settings.shortest + int(share * (settings.longest - settings.shortest))
    shape = Shape(
        int(rng.integers(1, most, endpoint=True)),
        int(rng.integers(settings.shortest, longest, endpoint=True)),
        int(rng.integers(settings.fewest_facts, settings.most_facts, endpoint=True)),
    )
    count = max(1, settings.batch_tokens // (shape.documents * shape.tokens + 2 * settings.task.questions))
    return draw(rng, settings.task, shape, count)


def _forward(model: PreTrainedModel, batch: Batch, read: str) -> tuple[Tensor, float]:
    """Loss and accuracy of the answers."""
    gold = torch.from_numpy(batch.gold).flatten()
    logits = _READ[read](model, torch.from_numpy(batch.documents), torch.from_numpy(batch.questions)).flatten(0, 1)
    accuracy = float((logits.argmax(-1) == gold).float().mean())
    return torch.nn.functional.cross_entropy(logits, gold), accuracy


def _read_spans(model: PreTrainedModel, documents: Tensor, questions: Tensor) -> Tensor:
    return ask(model, encode_apart(model, documents).assembled(exact), questions)


def _read_kv(model: PreTrainedModel, documents: Tensor, questions: Tensor) -> Tensor:
    return ask(model, encode_apart(model, documents).whole.without_state(), questions)


_READ: dict[str, Callable[[PreTrainedModel, Tensor, Tensor], Tensor]] = {
    "all": read_through,
    "no KV": partial(read_through, view="no_kv"),
    "spans": _read_spans,
    "spans, no state": _read_kv,
}
