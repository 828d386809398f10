"""Predictions of a hybrid after inexact recovery of its state: `python tail_replay.py KEY=VALUE ...`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from probe_model import (
    EMPTY,
    Batch,
    Memory,
    Shape,
    cache_of,
    distances,
    draw,
    extend_memory,
    memory_of,
    new_probe,
    question_logits,
)
from probe_report import FOLDER, Findings, run_program, write_findings
from probe_settings import ProbeModel, TailReplay
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, apply_rotary_pos_emb

from spanlab.core.rules import attention_block_flops, key_value_flops, mlp_flops
from spanlab.engine.hook import decoder_layers
from spanlab.engine.recurrent import MIXER, silence_kernel_warnings
from spanlab.model_files import find_spec
from spanlab.model_spec import ModelSpec
from spanlab.report import style
from spanlab.report.table import Cell, Field, Table, hidden, percent, tabulate, whole, with_ends, word
from spanlab.stats import Interval, positive_ratio, share
from spanlab.study.folder import entry_folder, print_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Errors of predictions and states against exact recompute, by the arm that replaces it.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Deviation:
    """Predictions and states of an arm compared with recompute, after the same tokens.

    `kl`      [N, Q]: KL(recompute ‖ arm), nats
    `same`    [N, Q]: both have the same likeliest token
    `right`   [N, Q]: the likeliest token is the gold answer
    `errors`  [L, N]: ‖S − S*‖ ÷ ‖S*‖ of every recurrent layer, Frobenius norms over heads
    `nbytes`  bytes of a stored state ÷ bytes in float32
    """

    kl: Floats
    same: NDArray[np.bool_]
    right: NDArray[np.bool_]
    errors: Floats
    nbytes: float = 1.0


@dataclass(frozen=True)
class Source:
    """Weights of a model: name, number of attention layers below each recurrent layer, and whether they are trained."""

    name: str
    below: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class RecoveryResult:
    """Result of an arm on one model over one gap; 95 % intervals from resampled prompts.

    `right`   share of right answers; None for random weights
    `errors`  mean error of the states of the layers with 0, 1, … attention layers below
    """

    source: Source
    gap: int
    arm: str
    kl: Interval
    same: Interval
    right: float | None
    errors: tuple[float, ...]
    nbytes: float


def recovery_result(source: Source, gap: int, arm: str, deviation: Deviation) -> RecoveryResult:
    """Return means over prompts and questions."""
    below = np.array(source.below)
    errors = tuple(float(deviation.errors[below == count].mean()) for count in range(max(below) + 1))
    counts = np.full((1, len(deviation.kl)), deviation.kl.shape[1], np.float64)
    return RecoveryResult(
        source,
        gap,
        arm,
        positive_ratio(deviation.kl.sum(1)[None], counts),
        share(deviation.same.sum(1, dtype=np.float64)[None], counts),
        float(deviation.right.mean()) if source.trained else None,
        errors,
        deviation.nbytes,
    )


# ------------------------------------------------------------------------------
# FLOPs of replays of a gap relative to recompute, for models whose last layer is attention,
# such as Qwen3.5.
#
# `resident_kv` omits the projections of keys and values, and everything above the last recurrent
# block: that layer's MLP
# block and the last attention layer. `tail_replay` omits attention blocks too.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """FLOPs of a gap's tokens ÷ FLOPs of their recompute, by recovery."""

    model: str
    context: int
    gap: int
    shares: dict[str, float]


def price(model: ModelSpec, context: int, gap: int) -> Price:
    """Return the price of a gap after `context` prompt tokens."""
    recompute = model.prefill_flops(context, context + gap)
    pairs = recompute - gap * model.linear_flops_per_token
    attention, mlp, layers = attention_block_flops(model), mlp_flops(model), model.attention_layers
    keys_values = key_value_flops(model)
    # Keys and values of the last layer are already counted with those of all layers.
    top = gap * (2 * mlp + attention - keys_values) + pairs // layers
    resident = recompute - gap * layers * keys_values - top
    left_out = recompute - gap * (layers * attention + 2 * mlp) - pairs
    skipped = left_out - gap * (layers - 1) * mlp
    alone = skipped - gap * (model.recurrent_layers - 1) * mlp
    names = ("resident_kv", "tail_replay", "tail_replay, attention layers skipped", "tail_replay, mixers alone")
    shares = (flops / recompute for flops in (resident, left_out, skipped, alone))
    return Price(model.name, context, gap, dict(zip(names, shares, strict=True)))


# ------------------------------------------------------------------------------
# Tables of `tail_replay`: predictions and states after recoveries, states in fewer bytes,
# FLOPs.
# ------------------------------------------------------------------------------


def _small(value: float) -> Cell:
    return Cell(value, f"{value:.2g}" if value >= 1e-3 or not value else f"{value:.0e}")


def _case(row: RecoveryResult) -> str:
    return f"{row.source.name}, {max(row.source.below)}, {row.gap}"


_CASE = (
    Field("case", "weights, attention\nlayers, gap", word, _case, left=True),
    Field("weights", "", hidden, "source.name"),
    Field("attention_below", "", hidden, lambda row: max(row.source.below)),
    Field("gap", "", hidden),
)
_ARM = Field("arm", "instead of\nrecompute", word, left=True)
_PREDICTED = (
    *with_ends(Field("kl", "KL, nats", lambda kl: _small(kl.mean))),
    *with_ends(Field("same", "same likeliest\ntoken", lambda same: percent(same.mean))),
    Field("right", "right\nanswers", percent),
)
_ERROR = Field("state_error", "error of the\ndeepest states", _small, "errors.-1")


def recovery_table(measurements: Sequence[RecoveryResult]) -> Table:
    """One row per model, gap and recovery."""
    notes = (
        "Attention layers: those below the deepest recurrent layers",
        "KL(recompute ‖ arm) of the next token, mean over questions",
        "Error of states: ‖S − S*‖ ÷ ‖S*‖, S* after recompute; mean over prompts and over the deepest recurrent layers",
    )
    fields = (*_CASE, _ARM, *_PREDICTED, _ERROR)
    return tabulate("recoveries", "Predictions where KV reaches deeper than the state", fields, measurements, notes)


def layers_table(measurements: Sequence[RecoveryResult]) -> Table:
    """Return the error of states by the attention layers below them, for the models with most of these layers."""
    deepest = max(len(row.errors) for row in measurements)
    rows = [row for row in measurements if len(row.errors) == deepest]
    errors = [
        Field(f"below_{count}", f"{count} attention\nbelow", _small, f"errors.{count}") for count in range(deepest)
    ]
    title = "Error of recurrent states by the attention layers below them"
    return tabulate("state_errors", title, (*_CASE, _ARM, *errors), rows)


def stored_table(measurements: Sequence[RecoveryResult]) -> Table:
    """One row per model, gap and format."""
    notes = (
        "The gap is recomputed exactly, from the stored state",
        "A row of a state is a key channel, a column a value channel",
    )
    stored = (
        Field("format", "state\nstored as", word, "arm", left=True),
        Field("bytes", "bytes of\nfloat32", percent, "nbytes"),
    )
    title = "Predictions after a state that was stored in fewer bytes"
    return tabulate("stored_states", title, (*_CASE, *stored, *_PREDICTED, _ERROR), measurements, notes)


def price_table(prices: Sequence[Price]) -> Table:
    """One row per model and context."""
    fields = (
        Field("case", "model, context", _model_context, whole, left=True),
        *(Field(name, "", hidden) for name in ("model", "context", "gap")),
        *(Field(name, name.replace(", ", ",\n"), percent) for name in prices[0].shares),
    )
    rows = [vars(price) | price.shares for price in prices]
    notes = (f"Gaps of {prices[0].gap:,} tokens behind so many tokens of context",)
    return tabulate("prices", "FLOPs of a replay ÷ FLOPs of recompute", fields, rows, notes)


def _model_context(price: dict[str, Any]) -> Cell:
    model, context = price["model"], price["context"]
    return Cell(f"{model} {context}", f"{model}, {context:,}")


# ------------------------------------------------------------------------------
# Figure of `tail_replay`: divergence by the length of the gap.
# ------------------------------------------------------------------------------

_COLOURS = ("#0072b2", "#d55e00", "#aa4499", "#56b4e9", "#222222")
_LEAST = 1e-8  # a smaller divergence is drawn here
_PANELS = 4  # side by side


def draw_recoveries(measurements: Sequence[RecoveryResult], footer: str) -> Figure:
    """Draw a panel per model: KL to recompute by gap, a line for each recovery."""
    models = list(dict.fromkeys(row.source for row in measurements))
    rows = -(-len(models) // _PANELS)
    figure, grid = style.framed_with(
        footer,
        "Divergence of the next token from exact recompute",
        rows,
        min(len(models), _PANELS),
        height=2.3 + 2.2 * rows,
        share=("all", "all"),
        margins=style.Margins(right=2.1, top=1.0),
        wspace=0.15,
        hspace=0.45,
    )
    panels = [ax for row in grid for ax in row]
    for ax, model in zip(panels, models, strict=False):
        _draw_model(ax, [row for row in measurements if row.source == model])
        ax.set_title(f"{model.name}\n{max(model.below)} attention below", fontsize=8, loc="left", color=style.INK)
    for ax in panels[len(models) :]:
        ax.set_axis_off()
    most = max(row.kl.mean for row in measurements)
    style.log_scale(panels[0].yaxis, _LEAST, max(most, 1.0))
    for row in grid:
        row[0].set_ylabel(f"KL (nats), from {_LEAST:g}", fontsize=8, color=style.INK)
    for ax in grid[-1]:
        ax.set_xlabel("gap (tokens)", fontsize=8, color=style.INK)
    style.legend_right(grid[0][-1], title="instead of recompute")
    return figure


def _draw_model(ax: Axes, measurements: Sequence[RecoveryResult]) -> None:
    for arm, colour in zip(dict.fromkeys(row.arm for row in measurements), _COLOURS, strict=True):
        arm_rows = [row for row in measurements if row.arm == arm]
        gaps = [row.gap for row in arm_rows]
        ax.plot(
            gaps,
            [max(row.kl.mean, _LEAST) for row in arm_rows],
            "o-",
            color=colour,
            markersize=3.5,
            label=arm.replace(", ", ",\n"),
        )
    style.log_scale(ax.xaxis, min(gaps), max(gaps))
    ax.set_xticks(gaps, list(map(str, gaps)), fontsize=8)


# ------------------------------------------------------------------------------
# Recoveries of a state from token s to token k, up to which KV is resident, by the blocks that
# run over the gap.
#
# `recompute` is the forward of all layers over [s, k), keys and values included. A recurrent
# layer reads the residual
# stream, which includes the outputs of the attention layers below it. So a replay is exact if
# attention runs, with
# queries of the gap against resident KV; keys and values need no projection, and no block above
# the last recurrent block
# has to run. If attention is skipped, recurrent layers above it read a different residual stream.
# ------------------------------------------------------------------------------

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Gap:
    """A gap of tokens `ids` [N, T]: the state is that of token `before.tokens`, and KV is resident to the end."""

    model: PreTrainedModel
    before: Memory
    resident: Memory
    ids: Tensor

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens of the gap, [T]."""
        return self.before.tokens + torch.arange(self.ids.shape[1])


@dataclass(frozen=True)
class Replay:
    """The blocks that run over a gap in addition to the recurrent ones.

    `attention`       attention blocks: queries of the gap, resident keys and values
    `attention_mlps`  MLP blocks of attention layers
    `recurrent_mlps`  MLP blocks of recurrent layers
    """

    attention: bool
    attention_mlps: bool
    recurrent_mlps: bool

    def __call__(self, gap: Gap) -> Memory:
        """Resident KV with the state at the end of the gap after the replay."""
        base: Any = gap.model.base_model
        cache = cache_of(gap.model, replace(gap.before, kv={}))
        hidden = base.embed_tokens(gap.ids)
        rotary = base.rotary_emb(hidden, gap.positions.expand(3, len(gap.ids), -1))
        last = max(gap.before.recurrent)
        for number, layer in enumerate(base.layers[: last + 1]):
            is_recurrent = hasattr(layer, MIXER)
            if is_recurrent:
                hidden = hidden + getattr(layer, MIXER)(layer.input_layernorm(hidden), cache_params=cache)
            elif self.attention:
                hidden = hidden + _attend(layer, hidden, rotary, gap)
            if number < last and (self.recurrent_mlps if is_recurrent else self.attention_mlps):
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        replayed = memory_of(cache, gap.resident.tokens)
        return replace(gap.resident, conv=replayed.conv, recurrent=replayed.recurrent)


def _attend(layer: Qwen3_5DecoderLayer, hidden: Tensor, rotary: Rotary, gap: Gap) -> Tensor:
    """Output [N, T, H] of an attention block, without computing keys and values of the gap."""
    attention, (keys, values) = layer.self_attn, gap.resident.kv[layer.self_attn.layer_idx]
    shape = (*hidden.shape[:2], -1, 2 * attention.head_dim)
    query, gate = attention.q_proj(layer.input_layernorm(hidden)).view(shape).chunk(2, -1)
    query = attention.q_norm(query).transpose(1, 2)
    query, _ = apply_rotary_pos_emb(query, query, *rotary)
    visible = torch.arange(keys.shape[2]) <= gap.positions[:, None]
    attended = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, scale=attention.scaling, enable_gqa=True
    )
    out: Tensor = attention.o_proj((attended.transpose(1, 2) * gate.sigmoid()).flatten(2))
    return out


def no_replay(gap: Gap) -> Memory:
    """Resident KV with the state before the gap: a control."""
    return replace(gap.resident, conv=gap.before.conv, recurrent=gap.before.recurrent)


RECOVERIES: dict[str, Callable[[Gap], Memory]] = {
    "resident_kv": Replay(attention=True, attention_mlps=True, recurrent_mlps=True),
    "tail_replay": Replay(attention=False, attention_mlps=True, recurrent_mlps=True),
    "tail_replay, attention layers skipped": Replay(attention=False, attention_mlps=False, recurrent_mlps=True),
    "tail_replay, mixers alone": Replay(attention=False, attention_mlps=False, recurrent_mlps=False),
    "no_replay": no_replay,
}


def capture_memories(model: PreTrainedModel, ids: Tensor, stops: Iterable[int]) -> dict[int, Memory]:
    """Memories of the prefill of `ids` [N, T] at every stop and at its end, by number of tokens."""
    memories, memory = {}, EMPTY
    for stop in sorted({*stops, ids.shape[1]}):
        memories[stop] = memory = extend_memory(model, memory, ids[:, memory.tokens : stop])
    return memories


# ------------------------------------------------------------------------------
# Storage formats of recurrent states smaller than float32; inputs of the convolution stay
# unchanged.
# ------------------------------------------------------------------------------

_LARGEST = 127


@dataclass(frozen=True)
class Int8:
    """A state as int8 numbers with shared scales.

    `values`  int8 [..., heads, d_k, d_v]
    `scale`   float32, one number for all values that share it: [..., heads, 1 or d_k, 1 or d_v]
    """

    values: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def state(self) -> Tensor:
        """The dequantised state, float32."""
        return self.values * self.scale


@dataclass(frozen=True)
class BFloat16:
    """A state as bfloat16 numbers."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def state(self) -> Tensor:
        """The dequantised state, float32."""
        return self.values.float()


def int8(state: Tensor, shared: tuple[int, ...]) -> Int8:
    """Round to the nearest multiples of a scale, set by the largest magnitude over the axes `shared`."""
    largest = state.abs().amax(shared, keepdim=True)
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    return Int8((state / scale).round().to(torch.int8), scale)


Format = Callable[[Tensor], Int8 | BFloat16]
"""Converts a state [..., heads, d_k, d_v] to its stored form."""

FORMATS: dict[str, Format] = {
    "bf16": lambda state: BFloat16(state.bfloat16()),
    "int8 per head": partial(int8, shared=(-2, -1)),
    "int8 per row": partial(int8, shared=(-1,)),
    "int8 per column": partial(int8, shared=(-2,)),
}
"""A row is a key channel, a column a value channel."""


# ------------------------------------------------------------------------------
# Predictions after every recovery and after compressed states, compared with those after exact
# recompute.
# ------------------------------------------------------------------------------

_TOGETHER = 32  # prompts of a forward


@dataclass(frozen=True)
class Case:
    """Prompts and questions of one forward, and the memories of the prefill of the prompts at every stop."""

    model: PreTrainedModel
    documents: Tensor
    questions: Tensor
    gold: Tensor
    memories: dict[int, Memory]

    @property
    def exact(self) -> Memory:
        """The memory after exact recompute."""
        return self.memories[self.documents.shape[1]]

    @cached_property
    def expected(self) -> Tensor:
        """Log probabilities [N, Q, vocabulary] after exact recompute."""
        return self._log_probabilities(self.exact)

    def gap(self, tokens: int) -> Gap:
        """The gap of the last `tokens` of the prompts."""
        start = self.documents.shape[1] - tokens
        return Gap(self.model, self.memories[start], self.exact, self.documents[:, start:])

    def departure(self, reached: Memory, nbytes: float = 1.0) -> Deviation:
        """Differences of predictions and states between a memory of the same tokens and exact recompute."""
        expected, log_probabilities = self.expected, self._log_probabilities(reached)
        kl = (expected.exp() * (expected - log_probabilities)).sum(-1).clamp(min=0)  # negative only by rounding
        predicted = log_probabilities.argmax(-1)
        same, right = predicted == expected.argmax(-1), predicted == self.gold
        errors = [distances(reached.recurrent[layer], state).double() for layer, state in self.exact.recurrent.items()]
        return Deviation(kl.numpy(), same.numpy(), right.numpy(), torch.stack(errors).numpy(), nbytes)

    def _log_probabilities(self, memory: Memory) -> Tensor:
        return question_logits(self.model, memory, self.questions).double().log_softmax(-1)


Arm = Callable[[Case, int], Deviation]
"""arm(case, gap)"""


def recoveries() -> dict[str, Arm]:
    """Arms that recover a float32 state over the gap."""
    return {name: partial(_recovered, recover=recover) for name, recover in RECOVERIES.items()}


def _recovered(case: Case, tokens: int, recover: Callable[[Gap], Memory]) -> Deviation:
    return case.departure(recover(case.gap(tokens)))


def stored_state_arms() -> dict[str, Arm]:
    """Arms that recompute the gap exactly, from a state in a smaller storage format."""
    return {name: partial(_restored, form=form) for name, form in FORMATS.items()}


def _restored(case: Case, tokens: int, form: Format) -> Deviation:
    before = case.gap(tokens).before
    stored = {layer: form(state) for layer, state in before.recurrent.items()}
    nbytes = sum(layer_state.nbytes for layer_state in stored.values())
    float32_nbytes = sum(state.numel() for state in before.recurrent.values()) * torch.float32.itemsize
    restored = replace(before, recurrent={layer: layer_state.state() for layer, layer_state in stored.items()})
    reached = extend_memory(case.model, restored, case.documents[:, before.tokens :]) if tokens else restored
    return case.departure(reached, nbytes / float32_nbytes)


def random_models(settings: TailReplay) -> Iterator[tuple[Source, PreTrainedModel]]:
    """Models with random weights and slow decay, with attention from nearly uniform to concentrated."""
    for groups in settings.groups:
        torch.manual_seed(settings.seed)
        model = new_probe(ProbeModel(groups=groups), settings.task.vocabulary).eval()
        silence_kernel_warnings(model)
        for score in settings.scores:
            _spread_scores(model, score)
            yield source_of(f"random, scores {score:g}", model, trained=False), model


@torch.no_grad()
def _spread_scores(model: PreTrainedModel, deviation: float) -> None:
    """Set the deviation of attention scores by the weight of the query norm, since queries and keys are normalised."""
    for layer in decoder_layers(model):
        if not hasattr(layer, MIXER):
            attention: Any = layer.self_attn
            attention.q_norm.weight.fill_(deviation - 1)  # transformers adds 1 to the weight


def source_of(name: str, model: PreTrainedModel, *, trained: bool) -> Source:
    """The name of a model in tables, with the attention layers below each recurrent layer."""
    kinds = [hasattr(layer, MIXER) for layer in decoder_layers(model)]
    return Source(name, tuple(kinds[:index].count(False) for index, kind in enumerate(kinds) if kind), trained)


@torch.no_grad()
def measure(
    source: Source, model: PreTrainedModel, settings: TailReplay, arms: dict[str, Arm], gaps: list[int]
) -> Iterator[RecoveryResult]:
    """Every arm over every gap, on the same prompts."""
    cases = list(_cases(model, settings, gaps))
    for gap in gaps:
        for name, arm in arms.items():
            yield recovery_result(source, gap, name, _joined([arm(case, gap) for case in cases]))


def _cases(model: PreTrainedModel, settings: TailReplay, gaps: list[int]) -> Iterator[Case]:
    rng, shape = np.random.default_rng(settings.seed), Shape(settings.documents, settings.tokens, settings.facts)
    batch = draw(rng, settings.task, shape, settings.sequences)
    for documents, questions, gold in _split(batch):
        memories = capture_memories(model, documents, {documents.shape[1] - gap for gap in gaps})
        yield Case(model, documents, questions, gold, memories)


def _split(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    arrays = (batch.documents.reshape(len(batch.documents), -1), batch.questions, batch.gold)
    return zip(*(torch.from_numpy(array).split(_TOGETHER) for array in arrays), strict=True)


def _joined(departures: list[Deviation]) -> Deviation:
    kl, same, right = (
        np.concatenate([getattr(departure, name) for departure in departures]) for name in ("kl", "same", "right")
    )
    return Deviation(
        kl, same, right, np.concatenate([departure.errors for departure in departures], axis=1), departures[0].nbytes
    )


# ------------------------------------------------------------------------------
# The entry `tail_replay`: predictions of a hybrid after inexact recovery of its state, and
# after stored states.
# ------------------------------------------------------------------------------

CAVEATS = (
    "models of a few million parameters, with random weights or trained on synthetic facts: sizes of errors need not "
    "be those of published weights",
)


def run_tail_replay(settings: TailReplay, run: str, root: Path) -> Path:
    """Measure every model, write a run folder, and return the folder."""
    import torch

    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    with entry_folder(settings, FOLDER, run, root) as folder:
        replays, formats = _measure(settings)
        findings = Findings(
            data=f"{settings.sequences} prompts of {settings.documents} x {settings.tokens} tokens, "
            f"{settings.task.questions} questions each",
            model=f"{len(settings.weights)} trained and {len(settings.groups) * len(settings.scores)} random hybrids",
            tables=[recovery_table(replays), layers_table(replays), stored_table(formats), *_price_tables(settings)],
            printed=4,
            figures={"recoveries": partial(draw_recoveries, replays)},
            caveats=CAVEATS,
        )
        write_findings(folder, "Recovery of recurrent states behind a gap", settings, findings, started)
    return folder.path


def _measure(settings: TailReplay) -> tuple[list[RecoveryResult], list[RecoveryResult]]:
    """Measure recoveries, and states stored in fewer bytes, for all models."""

    replays: list[RecoveryResult] = []
    formats: list[RecoveryResult] = []
    for source, model in _models(settings):
        print_line(Console(stderr=True), f"{source.name}, {len(source.below)} recurrent layers")
        replays += measure(source, model, settings, recoveries(), settings.gaps)
        formats += measure(source, model, settings, stored_state_arms(), [0, max(settings.gaps)])
    return replays, formats


def _price_tables(settings: TailReplay) -> list[Table]:
    specs, gap = map(find_spec, settings.models), max(settings.gaps)
    prices = [price(model, context, gap) for model in specs for context in settings.contexts]
    return [price_table(prices)] if prices else []


def _models(settings: TailReplay) -> Iterator[tuple[Source, PreTrainedModel]]:
    from probe_model import load

    for folder in settings.weights:
        model = load("weights", folder)
        if (vocab_size := model.config.vocab_size) != settings.task.vocabulary:
            raise ValueError(f"weights={folder}: expected a vocabulary of {settings.task.vocabulary}, not {vocab_size}")
        yield source_of(f"trained, {Path(folder).absolute().parent.name}", model, trained=True), model
    yield from random_models(settings)


if __name__ == "__main__":
    run_program(TailReplay, run_tail_replay)
