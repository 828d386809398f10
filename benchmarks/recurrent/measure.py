"""Time recurrent layers over packed rows: prompts, decodes, and prompts of which states are captured.

    python benchmarks/recurrent/measure.py [--models tiny-hybrid qwen3.5-0.8b-group] [--tokens 1024] [--rounds 9]

Each case runs all recurrent layers of a model with random weights over random rows. Prints a Markdown table of
milliseconds of processor time, the fastest of all rounds, as other jobs only ever add to it by emptying caches. Cases
take turns, so that what slows the machine down slows all of them. `capture` is the median ratio to the case without
captures of the same turn, less one.
`bound` is the time below which the products of the mixer and its scan cannot take, by the rate of a large product, or
its states cannot be read and written, by the rate of a large copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn

from spanlab.engine.load import measure, named_config, random_model
from spanlab.engine.model import SpanModel
from spanlab.engine.recurrent import MIXER, DecodeRecurrence, LayeredRows, Recurrence, StateScan
from spanlab.engine.scan import WIDTHS
from spanlab.engine.slots import StatePool

GRID = 64


@dataclass(frozen=True)
class Case:
    """Sequences of so many rows each, and after which rows of each a state is kept."""

    name: str
    rows: tuple[int, ...]
    captures: tuple[int, ...] = ()


def cases(tokens: int) -> Iterator[Case]:
    """Prompts of `tokens` together, a decode, and captures of one prompt on the grid of chunks and off it."""
    for count in (1, 4, 16):
        yield Case(f"prefill {count} × {tokens // count:,}", (tokens // count,) * count)
    yield Case("decode 16", (1,) * 16)
    yield Case("prefill of a cold prompt, 0 captures", (tokens,))
    for count in (1, 8):
        at = [tokens * number // (count + 1) // GRID * GRID for number in range(1, count + 1)]
        yield Case(f"{count} captures", (tokens,), tuple(at))
        yield Case(f"{count} captures off the grid", (tokens,), tuple(position + 5 for position in at))


class Bench:
    """A model's recurrent layers and their states."""

    def __init__(self, name: str) -> None:
        self.model: SpanModel = random_model(name, named_config(name))
        layers = [layer for layer in self.model.hf.base_model.layers if hasattr(layer, MIXER)]
        self.mixers: list[nn.Module] = [getattr(layer, MIXER).mixer for layer in layers]
        assert self.model.state_shape is not None, "a model without recurrent layers has nothing to time"
        self.shape = self.model.state_shape
        self._pool = StatePool(self.shape, self.model.dtype, self.model.device)

    @torch.no_grad()
    def seconds(self, case: Case) -> float:
        """Processor time of one forward's recurrent layers."""
        hidden = torch.randn(1, sum(case.rows), self.model.config.hidden_size, dtype=self.model.dtype)
        sequences, slots = self._sequences(case)
        began = process_time()
        self._run(self._recurrence(sequences), hidden)
        seconds = process_time() - began
        self._pool.free(slots)
        return seconds

    def _recurrence(self, sequences: list[list[StateScan]]) -> LayeredRows:
        """As the engine has it: of a batch that decodes, and of any other."""
        pieces = [piece for sequence in sequences for piece in sequence]
        if all(piece.stop == piece.start + 1 for piece in pieces):
            return DecodeRecurrence(self._pool, pieces, len(pieces), self.model.device)
        return Recurrence(self._pool, sequences, self.model.device)

    def _run(self, recurrence: LayeredRows, hidden: Tensor) -> None:
        for layer, mixer in enumerate(self.mixers):
            recurrence.run(layer, mixer, hidden)
        recurrence.finish()

    def _sequences(self, case: Case) -> tuple[list[list[StateScan]], list[int]]:
        sequences, slots, first = [], [], 0
        for rows in case.rows:
            slot = self._pool.allocate_running()
            keeps = {position: self._pool.allocate(cleared=False) for position in case.captures}
            cuts = pairwise([0, *case.captures, rows])
            sequences.append([StateScan(first + a, first + b, slot, a, keeps.get(b)) for a, b in cuts])
            slots += [slot, *keeps.values()]
            first += rows
        return sequences, slots

    def bound(self, case: Case) -> float:
        """Seconds below which the case cannot take."""
        rates = measure(self.model.dtype, self.model.device, process_time)
        rows, states = sum(case.rows), len(case.rows) + len(case.captures)
        flops = 2 * rows * sum(weight.numel() for mixer in self.mixers for weight in mixer.parameters())
        flops += rows * self._scan_flops(max(case.rows))
        moved = 2 * states * self._pool.slot_bytes
        return max(flops / rates.flops_per_s, moved / rates.bytes_per_s)

    def _scan_flops(self, longest: int) -> int:
        shape, width = self.shape, min(longest, WIDTHS[-1])
        per_head = width * (3 * shape.key_dim + 2 * shape.value_dim) + 3 * shape.key_dim * shape.value_dim
        return 2 * shape.layers * shape.heads * per_head


def table(name: str, tokens: int, rounds: int) -> Iterator[Sequence[str]]:
    """Rows of the table: model, case, milliseconds, ratio to the bound, and what captures add."""
    bench, known = Bench(name), list(cases(tokens))
    turns = [{case: bench.seconds(case) for case in known} for _ in range(rounds + 1)][1:]
    cold = next(case for case in known if case.name.endswith("0 captures"))
    for case in known:
        fastest, bound = min(turn[case] for turn in turns), bench.bound(case)
        added = median(turn[case] / turn[cold] for turn in turns) - 1
        capture = f"{added:.1%}" if case.captures else ""
        yield name, case.name, f"{fastest * 1e3:.2f}", f"{bound * 1e3:.2f}", f"{fastest / bound:.2f}", capture


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-hybrid", "qwen3.5-0.8b-group"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    names = ("model", "case", "ms", "bound", "ms ÷ bound", "capture")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for name in given.models:
        for row in table(name, given.tokens, given.rounds):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
