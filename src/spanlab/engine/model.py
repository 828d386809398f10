"""A transformers causal LM with spanlab's attention and recurrent states: packed rows in, logits
out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from spanlab import model_types
from spanlab.core.repair import SpanSettings
from spanlab.engine.hook import Attend, Forward, Keep, Project, Recur, Rotation, decoder_layers
from spanlab.engine.pages import PagePool, PageTable
from spanlab.engine.recurrent import MIXER
from spanlab.engine.slots import StateShape
from spanlab.model_config import ModelConfig
from spanlab.model_spec import ModelSpec
from spanlab_kernels import AngleTable


@dataclass(frozen=True, eq=False)
class SpanModel:
    """A model that passed the support check and runs packed rows of several requests.

    `hf`        the transformers model in evaluation mode; it runs only through `forward`.
    `rotation`  how all layers rotate queries and keys.
    `scales`    softmax scale of each attention layer.
    """

    name: str
    hf: PreTrainedModel
    rotation: Rotation
    scales: tuple[float, ...]

    @property
    def config(self) -> PreTrainedConfig:
        """The transformers config."""
        return self.hf.config

    @property
    def device(self) -> torch.device:
        """Device of the weights, and of all tensors passed to `forward`."""
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights, queries, keys and values."""
        return self.hf.dtype

    @property
    def layers(self) -> int:
        """Number of attention layers, the layers with a KV cache."""
        return len(self.scales)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each decoder layer, its index among the layers of the same kind, attention or
        recurrent."""
        kinds = [hasattr(layer, MIXER) for layer in decoder_layers(self.hf)]
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))

    @property
    def state_shape(self) -> StateShape | None:
        """Sizes of a recurrent state; None if all layers are attention layers."""
        layers = len(self.order) - self.layers
        if not layers:
            return None
        config = self.config
        matrix = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return StateShape(layers, *matrix, 2 * keys + values, config.linear_conv_kernel_dim)

    @property
    def query_heads(self) -> int:
        """Number of query heads."""
        heads: int = self.config.num_attention_heads
        return heads

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; query head h reads KV head h // (query_heads // kv_heads)."""
        return getattr(self.config, "num_key_value_heads", None) or self.query_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        channels: int = (
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.query_heads
        )
        return channels

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; token ids are in [0, vocab_size)."""
        size: int = self.config.vocab_size
        return size

    @property
    def context(self) -> int:
        """Maximum context length; positions are in [0, context)."""
        positions: int = self.config.max_position_embeddings
        return positions

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        rotations: Tensor,
        attend: Attend,
        logits_rows: Tensor,
        keep: Keep | None = None,
        recur: Recur | None = None,
        project: Project | None = None,
    ) -> Tensor:
        """Run packed rows through all layers; return float32 logits [len(logits_rows), vocab_size].

        `ids`          int64 [T], concatenated rows of several requests; the model has no boundaries
                       between them.
        `rotations`    int64 [T], RoPE positions for query and key of each row: the position in the
                       span or in the prompt, or 0 to leave both unrotated.
        `logits_rows`  int64, row indices after the last layer; may be empty.
        `keep`         selects the rows that enter each layer >= 1, see `hook.Keep`.
        `recur`        computes recurrent layers; required if the model has any.
        `project`      receives a layer's queries, keys and values before `keep` is called, see
                       `hook.Project`.

        The call does not synchronize with the device. The caller checks that logits are finite.
        """
        logits: Tensor = self.hf(
            input_ids=ids[None],
            position_ids=rotations[None],
            use_cache=False,
            logits_to_keep=logits_rows,
            span_forward=Forward(attend, self.order, keep, recur, project),
        ).logits[0]
        return logits.float()


def spec_of(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """Model sizes for a config with all tensors in `dtype` and recurrent states in float32.

    ValueError for an unsupported model type.
    """
    numbers = {"dtype": str(dtype).removeprefix("torch."), "mamba_ssm_dtype": "float32"}
    return model_types.spec_of(ModelConfig(f"model={name}", name, config.to_dict() | numbers))


# ------------------------------------------------------------------------------
# Objects of an engine that attention needs besides the query rows.
# ------------------------------------------------------------------------------


class AttentionContext(NamedTuple):
    """Model, KV pool, page table, RoPE angles and key layout."""

    model: SpanModel
    pool: PagePool
    pages: PageTable
    angles: AngleTable
    key_layout: SpanSettings


# ------------------------------------------------------------------------------
# Forwards of a model as CUDA graphs between its attentions, which the host launches in a tenth of
# the time. A captured piece depends on the padded number of rows alone: not on the spans, pages or
# states that attention and recurrent layers read, which run between the pieces. So a few captures
# serve every step and every engine of a model.
# ------------------------------------------------------------------------------

# a device computes up to so many rows in about the time of one: it reads the same weights
ROWS = 64
LARGEST = 512  # rows; the device needs more time for more of them than the host does without graphs

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records launches; what is recorded is not computed."""

    def session(self) -> AbstractContextManager[None]:
        """Surround all pieces of one forward."""
        ...

    def begin(self) -> None:
        """Start a piece."""
        ...

    def end(self) -> Replay:
        """End the piece; the result computes it on the present contents of the tensors that it
        reads."""
        ...


class GraphRecorder:
    """Records CUDA graphs that share one memory pool, since one is replayed at a time, in the order
    of capture."""

    def __init__(self) -> None:
        self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `Recorder`; a capture needs a stream of its own."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        """See `Recorder`."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory)

    def end(self) -> Replay:
        """See `Recorder`."""
        self._graph.capture_end()
        return self._graph.replay


class _Break(NamedTuple):
    """A layer that runs between two pieces.

    `before`  computes the piece that ends with the layer's inputs
    `run`     computes the layer for the first rows, and writes them where the next piece reads
    """

    before: Replay
    run: Callable[[int, Attend, Recur | None], None]


class _Captured(NamedTuple):
    """The pieces of a forward of so many rows, and its inputs and logits."""

    ids: Tensor
    rotations: Tensor
    logits_rows: Tensor
    breaks: list[_Break]
    last: Replay
    logits: Tensor


class Pieces:
    """Replays a model's forwards of up to `LARGEST` rows; each number of rows is captured at first
    use.

    Padding rows are computed from any earlier contents: no row of a piece affects another one.
    """

    def __init__(self, model: SpanModel, recorder: Recorder) -> None:
        # weak, so that a model that is no longer used is freed
        self._model, self._recorder = ref(model), recorder
        self._captured: dict[tuple[int, int], _Captured] = {}
        heads = model.query_heads, model.head_dim
        self._attended = torch.zeros(LARGEST, *heads, dtype=model.dtype, device=model.device)
        self._recurred = torch.zeros(
            1, LARGEST, model.config.hidden_size, dtype=model.dtype, device=model.device
        )

    def prepare(self) -> None:
        """Capture every number of rows, with logits of one row."""
        for rows in range(ROWS, LARGEST + 1, ROWS):
            self._of(rows, 1)

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        rotations: Tensor,
        attend: Attend,
        logits_rows: Tensor,
        recur: Recur | None = None,
    ) -> Tensor:
        """As `SpanModel.forward`."""
        rows, chosen = len(ids), len(logits_rows)
        captured = self._of(-(-rows // ROWS) * ROWS, 1 << max(chosen - 1, 0).bit_length())
        inputs = captured.ids, captured.rotations, captured.logits_rows
        for target, source in zip(inputs, (ids, rotations, logits_rows), strict=True):
            target[: len(source)].copy_(source)
        for before, run in captured.breaks:
            before()
            run(rows, attend, recur)
        captured.last()
        return captured.logits[:chosen].clone()  # the next replay overwrites these logits

    def _of(self, rows: int, chosen: int) -> _Captured:
        if (rows, chosen) not in self._captured:
            self._captured[rows, chosen] = self._capture(rows, chosen)
        return self._captured[rows, chosen]

    def _capture(self, rows: int, chosen: int) -> _Captured:
        model, counts = self._model(), (rows, rows, chosen)
        assert model is not None, "a model is kept by its engines"
        ids, rotations, logits_rows = (
            torch.zeros(count, dtype=torch.int64, device=model.device) for count in counts
        )
        attended, recurred = self._attended[:rows], self._recurred[:, :rows]
        breaks: list[_Break] = []

        def attend(layer: int, *states: Tensor) -> Tensor:
            def run(count: int, attend: Attend, recur: Recur | None) -> None:
                query, key, value = (state[:count] for state in states)
                attended[:count].copy_(attend(layer, query, key, value))

            breaks.append(_Break(self._recorder.end(), run))
            self._recorder.begin()
            return attended

        def recur(layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
            def run(count: int, attend: Attend, recur: Recur | None) -> None:
                assert recur is not None, "a forward through recurrent layers needs states"
                recurred[:, :count].copy_(recur(layer, mixer, hidden[:, :count]))

            breaks.append(_Break(self._recorder.end(), run))
            self._recorder.begin()
            return recurred

        with self._recorder.session():
            # once without a capture, in which libraries may not be initialised
            model.forward(
                ids, rotations, lambda *given: attended, logits_rows, recur=lambda *given: recurred
            )
            self._recorder.begin()
            logits = model.forward(ids, rotations, attend, logits_rows, recur=recur)
            last = self._recorder.end()
        return _Captured(ids, rotations, logits_rows, breaks, last, logits)


_SHARED: WeakKeyDictionary[SpanModel, Pieces] = WeakKeyDictionary()


def pieces_of(model: SpanModel) -> Pieces:
    """The pieces of a model as CUDA graphs, all captured; every engine of the model gets the
    same."""
    if model not in _SHARED:
        pieces = Pieces(model, GraphRecorder())
        pieces.prepare()
        _SHARED[model] = pieces
    return _SHARED[model]
