"""A transformers causal LM with spanlab's attention and recurrent states: packed rows in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
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
        """For each decoder layer, its index among the layers of the same kind, attention or recurrent."""
        kinds = [hasattr(layer, MIXER) for layer in decoder_layers(self.hf)]
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))

    @property
    def state_shape(self) -> StateShape | None:
        """Sizes of a recurrent state; None if all layers are attention layers."""
        layers = len(self.order) - self.layers
        if not layers:
            return None
        config = self.config
        matrix = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
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
        channels: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.query_heads
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

        `ids`          int64 [T], concatenated rows of several requests; the model has no boundaries between them.
        `rotations`    int64 [T], RoPE positions for query and key of each row: the position in the span or in the
                       prompt, or 0 to leave both unrotated.
        `logits_rows`  int64, row indices after the last layer; may be empty.
        `keep`         selects the rows that enter each layer >= 1, see `hook.Keep`.
        `recur`        computes recurrent layers; required if the model has any.
        `project`      receives a layer's queries, keys and values before `keep` is called, see `hook.Project`.

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
