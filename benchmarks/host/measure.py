"""Time what the engine does on the host beside the model's forward, in steps of decoding.

    python benchmarks/host/measure.py [--weights FOLDER]

Steps by batch and context length. Without weights the forward is stubbed, and all that is left is the host's. Prefills
and their bound are those of the entry `pic_bench`.

Prints a Markdown table of medians in milliseconds of processor time, which other jobs do not lengthen by waiting; every
step is counted from planning to what is stored after it. Arms take turns, in an order that turns round, and the first
turn does not count: whichever arm came first looked slower. `bound` is the time below which the step cannot take, by
the rates of a large product and a large copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from spanlab.build import build_engine, build_model, build_policy
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import features
from spanlab.engine.load import measure
from spanlab.engine.model import SpanModel
from spanlab.settings import Study
from spanlab_sim.bounds import Bound

ARMS = ("pic", "lego_link_16", "radix")
DOCUMENTS = 8
QUESTION = 32
STEPS = 20
TURNS = 4  # beside the first, which does not count
VOCABULARY = 512


@dataclass(frozen=True, eq=False)
class TimedModel(SpanModel):
    """A model that counts the seconds within its forwards."""

    spent: SimpleNamespace

    def forward(self, *given: object, **more: object) -> Tensor:
        """As the model's."""
        began = process_time()
        logits = self.run(*given, **more)
        self.spent.seconds += process_time() - began
        return logits

    def run(self, *given: object, **more: object) -> Tensor:
        """The forward itself."""
        return super().forward(*given, **more)


@dataclass(frozen=True, eq=False)
class StubModel(TimedModel):
    """The same without a forward: it gives logits that mean nothing, at once."""

    def run(self, ids: Tensor, rotations: Tensor, attend: object, logits_rows: Tensor, *given: object, **more: object):
        """Zeros, of the shape that the model's logits have."""
        return torch.zeros(len(logits_rows), VOCABULARY)


@dataclass(frozen=True)
class Step:
    """Seconds of one step, those of them within the forward, and its bound."""

    seconds: float
    forward: float
    bound: float

    @property
    def host(self) -> float:
        """Seconds beside the forward."""
        return self.seconds - self.forward


class Bench:
    """One arm's engine and scheduler on a timed model."""

    def __init__(self, study: Study, arm: str, page: int, model: TimedModel, requests: list[Request]) -> None:
        strategy = replace(study.arms[arm], block_size=page)
        longest = max(request.num_tokens for request in requests)
        policy = build_policy(study, strategy, 0, longest)
        self.engine = build_engine(study, strategy, model, policy, requests)
        self.scheduler, self.spent = Scheduler(policy, study.batch), model.spent
        self._bound = Bound(study.model, measure(model.dtype, model.device, process_time))

    def serve(self, requests: list[Request]) -> Iterator[Step]:
        """Steps until all requests have ended."""
        for request in requests:
            self.scheduler.add(request)
        while not self.scheduler.idle:
            yield self._step()

    def _step(self) -> Step:
        began, self.spent.seconds = process_time(), 0.0
        step = self.scheduler.schedule(0)
        assert step is not None, "the store holds all requests"
        bound = self._bound.seconds([features(step, 0, self.engine.policy.rules)])
        result = self.engine.execute(step, None)
        self.scheduler.complete(step, 0, result.finished)
        self.engine.completed(step)
        return Step(process_time() - began, self.spent.seconds, bound)


def requests_of(count: int, tokens: int, output: int, vocabulary: int) -> list[Request]:
    """Prompts of the same documents, each in another order, with a question of its own."""
    draw = np.random.default_rng(0)
    length = (tokens - QUESTION) // DOCUMENTS
    documents = [Span(_ids(draw, length, vocabulary), independent=True) for _ in range(DOCUMENTS)]
    found = []
    for number in range(count):
        order = draw.permutation(DOCUMENTS)
        question = Span(_ids(draw, tokens - length * DOCUMENTS, vocabulary))
        found.append(Request(number, 0, (*(documents[at] for at in order), question), output))
    return found


def _ids(draw: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    return draw.integers(3, vocabulary, count).astype(np.int32)


def in_turns(arms: list[str], times: Callable[[str], list[Step]]) -> Iterator[tuple[str, list[Step]]]:
    """The steps of each arm, of all turns but the first."""
    found: dict[str, list[Step]] = {arm: [] for arm in arms}
    for turn in range(1 + TURNS):
        for arm in arms[:: -1 if turn % 2 else 1]:
            found[arm] += times(arm)
        if turn == 0:
            found = {arm: [] for arm in arms}
    yield from found.items()


def times_of(study: Study, page: int, model: TimedModel, batch: int, tokens: int, arm: str) -> list[Step]:
    """Steps of `batch` requests that all decode."""
    requests = requests_of(batch, tokens, STEPS + 2, min(model.vocab_size, VOCABULARY))
    bench = Bench(study, arm, page, model, requests)
    steps = []
    for step in bench.serve(requests):
        whole = len(bench.scheduler.running) == batch and not bench.scheduler.waiting
        steps.append((whole and all(s.generated > 2 for s in bench.scheduler.running), step))
    return [step for whole, step in steps if whole]


def stub() -> StubModel:
    """A model of one layer that is never run."""
    from spanlab.engine.load import named_config, random_model

    config = named_config("tiny")
    config.num_hidden_layers = 1
    small = random_model("stub", config)
    return StubModel(small.name, small.hf, small.rotation, small.scales, SimpleNamespace(seconds=0.0))


def timed(study: Study) -> TimedModel:
    """The study's model."""
    model = build_model(study)
    return TimedModel(model.name, model.hf, model.rotation, model.scales, SimpleNamespace(seconds=0.0))


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="folder of a model as transformers saves it")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--arms", nargs="+", default=ARMS)
    given = parser.parse_args()
    names = ("arm", "page", "case", *PARTS, "host ÷ forward", "step ÷ bound")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for arm, page, case, steps in cases(given):
        found = {name: median(getattr(step, name) for step in steps) * 1e3 for name in PARTS}
        shares = (("host", "forward"), ("seconds", "bound"))
        ratios = [f"{found[part] / found[of]:.2f}" if given.weights else "" for part, of in shares]
        print(f"| {' | '.join([arm, str(page), case, *(f'{ms:.2f}' for ms in found.values()), *ratios])} |", flush=True)


PARTS = ("seconds", "forward", "host", "bound")


def cases(given: argparse.Namespace) -> Iterator[tuple[str, int, str, list[Step]]]:
    """Arm, page, batch and context, and their steps."""
    batch = ["batch.max_num_seqs=64", "batch.max_num_batched_tokens=1048576"]
    study = compose("pic_bench", [*_weights(given.weights), *batch])
    model = stub() if given.weights is None else timed(study)
    for page, batch, tokens in product(given.pages, given.batches, given.contexts):
        for arm, steps in in_turns(list(given.arms), partial(times_of, study, page, model, batch, tokens)):
            yield arm, page, f"{batch} × {tokens:,}", steps


def _weights(folder: str | None) -> list[str]:
    """Settings of a model in a folder."""
    if folder is None:
        return []
    bytes4 = ["model.weight_itemsize=4", "model.kv_itemsize=4"]
    return [f"model={folder}", "engine.weights=path", f"engine.path={folder}", *bytes4]


if __name__ == "__main__":
    main()
