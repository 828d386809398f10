"""Train the probe, and write its weights and training curve: `python train_probe.py KEY=VALUE ...`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from probe_model import Batch, Shape, draw, encode_apart, forward_logits, question_logits
from probe_report import FOLDER, Findings, TrainingPoint, draw_training, run_program, training_table, write_findings
from probe_settings import TrainProbe
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.maps import exact
from spanlab.study.folder import entry_folder, print_line

# ------------------------------------------------------------------------------
# Training of the probe: one loop; the questions of a step read a memory that is drawn per step.
# ------------------------------------------------------------------------------


def train(model: PreTrainedModel, settings: TrainProbe) -> Iterator[TrainingPoint]:
    """Train in place; yield one point per memory kind every `every` steps."""
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    results: dict[str, list[tuple[float, float]]] = {}
    for step in range(1, settings.steps + 1):
        memory_kind = _draw_memory_kind(rng, settings)
        loss, accuracy = _forward(model, _batch(rng, step, settings), memory_kind)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        results.setdefault(memory_kind, []).append((float(loss.detach()), accuracy))
        if step % settings.every == 0 or step == settings.steps:
            yield from (_point(step, memory_kind, values) for memory_kind, values in results.items())
            results.clear()


def _point(step: int, memory_kind: str, values: list[tuple[float, float]]) -> TrainingPoint:
    loss, accuracy = np.mean(values, axis=0)
    return TrainingPoint(step, memory_kind, len(values), float(loss), float(accuracy))


def _rate(step: int, settings: TrainProbe) -> float:
    """Factor of the highest learning rate: linear warm-up, constant, cosine decay."""
    rise, fall = settings.warm_up * settings.steps, settings.decay * settings.steps
    remaining = (settings.steps - step) / fall if fall else 1.0
    return min(1.0, (step + 1) / (rise + 1)) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, remaining)))


def _draw_memory_kind(rng: np.random.Generator, settings: TrainProbe) -> str:
    """Draw the kind of memory that the questions of a step read."""
    shares = {"no KV": settings.hidden_kv, "spans": settings.isolated, "spans, no state": settings.empty_state}
    shares["all"] = 1 - sum(shares.values())
    return str(rng.choice(list(shares), p=list(shares.values())))


def _batch(rng: np.random.Generator, step: int, settings: TrainProbe) -> Batch:
    """Sequences of one shape; the curriculum increases the number and the length of documents."""
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


def _forward(model: PreTrainedModel, batch: Batch, memory_kind: str) -> tuple[Tensor, float]:
    """Loss and accuracy of the answers."""
    gold = torch.from_numpy(batch.gold).flatten()
    logits = _MEMORY_KINDS[memory_kind](
        model, torch.from_numpy(batch.documents), torch.from_numpy(batch.questions)
    ).flatten(0, 1)
    accuracy = float((logits.argmax(-1) == gold).float().mean())
    return torch.nn.functional.cross_entropy(logits, gold), accuracy


def _spans_logits(model: PreTrainedModel, documents: Tensor, questions: Tensor) -> Tensor:
    return question_logits(model, encode_apart(model, documents).assembled(exact), questions)


def _kv_logits(model: PreTrainedModel, documents: Tensor, questions: Tensor) -> Tensor:
    return question_logits(model, encode_apart(model, documents).base.without_state(), questions)


_MEMORY_KINDS: dict[str, Callable[[PreTrainedModel, Tensor, Tensor], Tensor]] = {
    "all": forward_logits,
    "no KV": partial(forward_logits, view="no_kv"),
    "spans": _spans_logits,
    "spans, no state": _kv_logits,
}


# ------------------------------------------------------------------------------
# The entry `train_probe`: train the probe, and store its weights and training curve.
# ------------------------------------------------------------------------------

WEIGHTS = "weights"


def run_train_probe(settings: TrainProbe, run: str, root: Path) -> Path:
    """Train the probe, write a run folder, and return the folder."""
    import torch
    from probe_model import initial_model

    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    model = initial_model(settings)
    with entry_folder(settings, FOLDER, run, root) as folder:
        points = list(_print_points(train(model, settings)))
        model.save_pretrained(folder.work / WEIGHTS)
        findings = Findings(
            data=f"{settings.steps} steps of {settings.batch_tokens:,} tokens, up to {settings.documents} documents",
            model=f"probe of {model.num_parameters():,} parameters",
            tables=[training_table(points)],
            printed=1,
            figures={"training": partial(draw_training, points)},
        )
        write_findings(folder, "Training of the probe", settings, findings, started)
    return folder.path


def _print_points(points: Iterable[TrainingPoint]) -> Iterator[TrainingPoint]:
    """Yield the points, and print each one."""
    console = Console(stderr=True)
    for point in points:
        print_line(console, f"step {point.step}, {point.read}: loss {point.loss:.3f}, accuracy {point.accuracy:.1%}")
        yield point


if __name__ == "__main__":
    run_program(TrainProbe, run_train_probe)
