"""A transformers causal LM whose attention is ours: packed rows in, logits out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spanlab.engine.hook import Attend, Forward, Keep
from spanlab.engine.rotation import Rotation
from spanlab.model_spec import ModelSpec


@dataclass(frozen=True, eq=False)
class SpanModel:
    """A model that passed the gate, ready to be run on packed rows of several requests.

    `hf`        the transformers model itself, in evaluation mode; it runs only through `forward`.
    `rotation`  how all layers turn queries and keys.
    `scales`    per layer, what query-key products are multiplied by before the softmax.
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
        """Decoder layers, all of them attention."""
        return len(self.scales)

    @property
    def query_heads(self) -> int:
        """Heads of the query."""
        return self.config.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; query head h reads head h // (query_heads // kv_heads)."""
        return getattr(self.config, "num_key_value_heads", None) or self.query_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.query_heads

    @property
    def vocab_size(self) -> int:
        """Token ids are [0, vocab_size)."""
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Positions the model was made for: [0, context)."""
        return self.config.max_position_embeddings

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        rotations: Tensor,
        attend: Attend,
        logits_rows: Tensor,
        keep: Keep | None = None,
        *,
        step: int = 0,
    ) -> Tensor:
        """Run packed rows through all layers; logits float32 [len(logits_rows), vocab_size] of the rows asked for.

        `ids`          int64 [T], rows of several requests one behind the other; the model knows no border between them.
        `rotations`    int64 [T], positions by which the model itself turns query and key of each row: where the row
                       stands in its span, or in its prompt, or 0 to get both unturned.
        `logits_rows`  int64, among the rows that are left after the last layer; may be empty.
        `keep`         which rows go on from each layer >= 1, see `hook.Keep`.

        FloatingPointError where a logit is no finite number; `step` is named in it.
        """
        logits = self.hf(
            input_ids=ids[None],
            position_ids=rotations[None],
            use_cache=False,
            logits_to_keep=logits_rows,
            span_forward=Forward(attend, keep),
        ).logits[0]
        if not torch.isfinite(logits).all():
            raise FloatingPointError(f"Model {self.name!r} gave logits that are no finite numbers in step {step}.")
        return logits.float()

    def spec(self) -> ModelSpec:
        """What this model costs, as the policies and the timing models count it."""
        return spec_of(self.name, self.config, self.dtype.itemsize)


def spec_of(name: str, config: PreTrainedConfig, itemsize: int) -> ModelSpec:
    """What a dense model of that config costs, with weights and KV of `itemsize` bytes per number."""
    heads = config.num_attention_heads
    return ModelSpec(
        name=name,
        attention_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        attention_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        tied_embeddings=config.tie_word_embeddings,
        weight_itemsize=itemsize,
        kv_itemsize=itemsize,
    )
