"""A transformers causal LM whose attention and states are ours: packed rows in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spanlab.engine.hook import Attend, Forward, Keep, Project, Recur, decoder_layers
from spanlab.engine.recurrent import MIXER
from spanlab.engine.rotation import Rotation
from spanlab.engine.state_pool import StateShape
from spanlab.model_spec import ModelSpec
from spanlab.models import sizes
from spanlab.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class SpanModel:
    """A model that passed the support check, ready to be run on packed rows of several requests.

    `hf`        the transformers model itself, in evaluation mode; it runs only through `forward`.
    `rotation`  how all layers rotate queries and keys.
    `scales`    per attention layer, what query-key products are multiplied by before the softmax.
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
        """Where the weights are, and where all tensors given to `forward` must be."""
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        """What weights, queries, keys and values are made of."""
        return self.hf.dtype

    @property
    def layers(self) -> int:
        """Attention layers: those that keys and values are kept of."""
        return len(self.scales)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each decoder layer, its rank among those of its kind, attention or recurrent."""
        kinds = [hasattr(layer, MIXER) for layer in decoder_layers(self.hf)]
        return tuple(kinds[:at].count(kind) for at, kind in enumerate(kinds))

    @property
    def state_shape(self) -> StateShape | None:
        """Sizes of a recurrent state; None where all layers are attention."""
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
        """Heads of the query."""
        heads: int = self.config.num_attention_heads
        return heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; query head h reads head h // (query_heads // kv_heads)."""
        return getattr(self.config, "num_key_value_heads", None) or self.query_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        channels: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.query_heads
        return channels

    @property
    def vocab_size(self) -> int:
        """Token ids are [0, vocab_size)."""
        size: int = self.config.vocab_size
        return size

    @property
    def context(self) -> int:
        """Positions the model was made for: [0, context)."""
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
        """Run packed rows through all layers; logits float32 [len(logits_rows), vocab_size] of the rows asked for.

        `ids`          int64 [T], rows of several requests one behind the other; the model knows no border between them.
        `rotations`    int64 [T], positions by which the model itself rotates query and key of each row: where the row
                       stands in its span, or in its prompt, or 0 to get both unrotated.
        `logits_rows`  int64, among the rows that are left after the last layer; may be empty.
        `keep`         which rows go on from each layer >= 1, see `hook.Keep`.
        `recur`        what recurrent layers do, where there are any.
        `project`      what is told of a layer's keys and values before `keep` is, see `hook.Project`.

        Nothing here waits for the device; whether logits are finite numbers is for the caller to ask.
        """
        logits: Tensor = self.hf(
            input_ids=ids[None],
            position_ids=rotations[None],
            use_cache=False,
            logits_to_keep=logits_rows,
            span_forward=Forward(attend, self.order, keep, recur, project),
        ).logits[0]
        return logits.float()

    def spec(self) -> ModelSpec:
        """What this model costs, as the policies and the timing models count it."""
        return spec_of(self.name, self.config, self.dtype)


def spec_of(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """What a model of that config costs with all numbers in `dtype`, but recurrent states in float32.

    ValueError for a type of model whose sizes are not known.
    """
    numbers = {"dtype": str(dtype).removeprefix("torch."), "mamba_ssm_dtype": "float32"}
    return sizes.spec_of(ModelConfig(f"model={name}", name, config.to_dict() | numbers))
