"""Sizes of a model: bytes of KV per token, bytes per state, and FLOPs; integers only, no
tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Annotated, Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from spanlab.recurrences import RECURRENCES, Recurrence
from spanlab.registry import Registry, not_negative, one_of, positive

Positions = NDArray[np.integer]
Counts = NDArray[np.int64]

GIB = 1 << 30

_SIZES = ("hidden_size", "vocab_size", "attention_heads", "kv_heads", "head_dim")
_ALWAYS_POSITIVE = (*_SIZES, "weight_itemsize", "kv_itemsize", "block_size", "grid")
_EXPERT_SIZES = ("experts", "experts_per_token", "expert_intermediate_size")
_STATE_SIZES = ("recurrent_key_heads", "recurrent_key_dim", "state_itemsize")
_POSITIVE_IF_HYBRID = (
    "recurrent_value_heads",
    "recurrent_value_dim",
    "conv_kernel",
    "conv_itemsize",
)


@overload
def causal_pairs(start: int, stop: int) -> int: ...
@overload
def causal_pairs(start: Positions, stop: Positions | int) -> Counts: ...
@overload
def causal_pairs(start: int, stop: Positions) -> Counts: ...
def causal_pairs(start: Positions | int, stop: Positions | int) -> Counts | int:
    """Query-key pairs of prompt tokens [start, stop): the token at position t attends to t + 1
    keys."""
    first, last = _wide(start), _wide(stop)
    return (last * (last + 1) - first * (first + 1)) // 2


def _wide(position: Positions | int) -> Counts | int:
    # The square of a position of 100k silently overflows int32.
    return position.astype(np.int64) if isinstance(position, np.ndarray) else int(position)


def block_tokens(kv_bytes: float, state_bytes: float, multiple: int) -> int:
    """Return the least multiple of `multiple` tokens whose KV in one layer is no smaller than one
    layer's state.

    vLLM 0.32.0 sizes the blocks of hybrids so, since one pool of equal blocks holds both.
    `kv_bytes` is of one token.
    """
    return int(-(-state_bytes // (kv_bytes * multiple))) * multiple


def layers_per_group(*layers: int) -> int:
    """Return the layers of one kind that share a block: as many as the smallest kind has (vLLM
    0.32.0).

    If the largest kind has less than half as many more, every kind has one group, and smaller ones
    are padded.
    """
    fewest, most = min(layers), max(layers)
    return most if 2 * most < 3 * fewest else fewest


REACHES = ("window", "chunk")


def local_pairs(
    reach: str, span: int, start: Positions | int, stop: Positions | int
) -> Counts | int:
    """Query-key pairs of prompt tokens [start, stop) in a layer that reads `span` tokens at most.

    window: the token at position t reads the last min(t + 1, span); chunk: those since the last
    multiple of `span`.
    """
    first, last = _wide(start), _wide(stop)
    return _pairs_before(reach, span, last) - _pairs_before(reach, span, first)


def _pairs_before(reach: str, span: int, position: Counts | int) -> Counts | int:
    if reach == "chunk":
        whole, rest = position // span, position % span
        return whole * (span * (span + 1) // 2) + rest * (rest + 1) // 2
    inside = np.minimum(position, span) if isinstance(position, np.ndarray) else min(position, span)
    return inside * (inside + 1) // 2 + (position - inside) * span


@dataclass(frozen=True, slots=True)
class BoundedReads:
    """Reads of layers of one kind, each of `span` tokens per query at most.

    `pair_flops`   FLOPs per query-key pair of all these layers
    `token_bytes`  bytes per token of their keys and values
    """

    reach: str
    span: int
    pair_flops: int
    token_bytes: int

    def work(self, start: int, stop: int) -> tuple[int, int]:
        """Return the FLOPs and bytes of a chunk [start, stop): keys before it are read once, its
        own are written."""
        before = start % self.span if self.reach == "chunk" else min(start, self.span - 1)
        moved = before + stop - start
        return self.pair_flops * int(
            local_pairs(self.reach, self.span, start, stop)
        ), self.token_bytes * moved

    def of_rows(self, count: int) -> tuple[int, int]:
        """Return the FLOPs and bytes of single rows, of which each reads a whole span and writes
        its token.

        A shorter context, or one inside of a chunk, reads less: so that a run of equal steps is a
        straight line.
        """
        return self.pair_flops * self.span * count, self.token_bytes * (self.span + 1) * count


# Not frozen, because OmegaConf makes a frozen schema read-only and YAML could not extend it; no
# code assigns to it.
@dataclass
class LocalLayers:
    """Attention layers of one kind that read some of the tokens before each: their KV behind those
    is freed.

    `layers`      number of layers.
    `reach`       window: the last `span` tokens, itself among them; chunk: those since the last
                  multiple of `span`.
    `span`        tokens.
    `kv_size`     numbers stored per token and layer: 2 · KV heads · head dimension.
    `pair_size`   multiplications per query-key pair and layer: heads · (dimensions of key and of
                  value).
    `parameters`  of one layer's projections.
    `first`       whether the model's first layer is one of them; vLLM frees the blocks of its group
                  first.
    `readers`     further layers that read the keys and values of one of these and store none.
    `drafts`      whether layers of the model's own drafter (multi-token prediction) are of this
                  kind.
    """

    layers: int = 0
    reach: str = "window"
    span: int = 0
    kv_size: int = 0
    pair_size: int = 0
    parameters: int = 0
    first: bool = True
    readers: int = 0
    drafts: bool = False

    def __post_init__(self) -> None:
        one_of("model.local.reach", self.reach, REACHES)
        for key in ("layers", "span", "kv_size", "pair_size"):
            if isinstance(value := getattr(self, key), int) and value < 1:
                raise ValueError(f"model.local.{key} is {value}, expected a positive integer.")


# Not frozen, for the same reason.
@dataclass
class PackedEntries:
    """Equal tables of entries in some layers; a block has the entries of several such tables side
    by side (vLLM).

    `layers`      number of layers that have the table.
    `span`        tokens before each whose entries are kept, itself among them; 0: all.
    `tokens`      tokens that an entry stands for.
    `entry_bytes`  bytes of an entry.
    `block_size`  tokens of a block.
    `alignment`   bytes of which a block's entries of one layer are a multiple.
    `pair_size`   multiplications per query and entry; 0: queries do not read it, as the open entry
                  of a compressor.
    `chosen`      entries that a query reads at most; 0: all that are kept.
    `parameters`  of one layer's projections to the entries.
    `drafts`      whether layers of the model's own drafter (multi-token prediction) have this table
                  alone.
    """

    layers: int = 0
    span: int = 0
    tokens: int = 1
    entry_bytes: int = 0
    block_size: int = 0
    alignment: int = 1
    pair_size: int = 0
    chosen: int = 0
    parameters: int = 0
    drafts: bool = False

    def __post_init__(self) -> None:
        for key in ("layers", "tokens", "entry_bytes", "block_size", "alignment"):
            if isinstance(value := getattr(self, key), int) and value < 1:
                raise ValueError(f"model.packed.{key} is {value}, expected a positive integer.")

    @property
    def page_bytes(self) -> int:
        """Bytes of a block's entries of one layer."""
        entries = self.block_size // self.tokens * self.entry_bytes
        return -(-entries // self.alignment) * self.alignment

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes per token of all layers."""
        return Fraction(self.layers * self.page_bytes, self.block_size)

    @property
    def flops_per_pair(self) -> int:
        """FLOPs per query and token that the entries stand for, of all layers."""
        return 2 * self.layers * self.pair_size // self.tokens


# Not frozen, for the same reason.
@dataclass
class ModelSpec:
    """Geometry of a decoder of attention layers and, if hybrid, recurrent layers, and of its SwiGLU
    blocks.

    `name`                 the model's name.
    `attention_layers`     number of attention layers that read all tokens before each.
    `readers`              further layers that read the keys and values of one of these and store
                           none (Gemma 3n).
    `attention_first`      whether a hybrid's first layer is one of attention; vLLM frees the blocks
                           of its group first.
    `recurrent_layers`     number of recurrent layers; 0 for an attention-only model.
    `recurrence`           kind of them, which has operations of its own per token and number of a
                           state.
    `local`                attention layers that read a window or a chunk.
    `packed`               tables of entries of all attention layers, where blocks pack several of
                           them (DeepSeek-V4).
    `hidden_size`          width of the residual stream.
    `intermediate_size`    width of the SwiGLU block; 0 if all layers have experts.
    `mlp_layers`           SwiGLU blocks and mixtures of experts; 0: one behind every attention and
                           recurrent layer.
    `mlp_matrices`         matrices of such a block and of an expert: three, or two without a gate
                           (Nemotron-H).
    `vocab_size`           rows of the embedding table.
    `attention_heads`      query heads per attention layer.
    `kv_heads`             key and value heads per attention layer.
    `head_dim`             channels per attention head.
    `kv_size`              numbers stored per token and attention layer; 0: 2 · kv_heads · head_dim.
                           Latent attention (MLA) stores one latent and one rotated key.
    `pair_size`            multiplications per query-key pair and layer; 0: 2 · attention_heads ·
                           head_dim.
    `attention_parameters`  of one attention layer's projections; 0: those of query, key, value and
                            output.
    `indexed_layers`       attention layers whose queries read a few tokens each, which an index
                           chooses.
    `index_layers`         of these, layers with an index of their own.
    `index_bytes`, `index_pair_size`, `index_parameters`  of one index: bytes per token,
                                                          multiplications per query-key
                           pair, and parameters.
    `selected`             tokens that a query of an indexed layer reads at most.
    `gated_attention`      the query projection is twice as wide, its second half gating the output
                           (Qwen3.5).
    `tied_embeddings`      the output head is the embedding table, stored once.
    `recurrent_key_heads`, `recurrent_value_heads`  heads per recurrent layer.
    `recurrent_key_dim`, `recurrent_value_dim`  channels per head: d_k and d_v of the state.
    `conv_kernel`          length of the short convolution.
    `exports_states`       kernels of its recurrent layers store a state inside of a chunk, on any
                           card (KDA, Mamba-2).
    `recurrent_parameters`  of one recurrent layer; 0: those of GatedDeltaNet.
    `expert_layers`        layers that have a mixture of experts in place of one SwiGLU block; 0 for
                           a dense model.
    `experts`, `experts_per_token`  experts of such a layer, and how many of them each token
                                    activates.
    `expert_intermediate_size`, `shared_intermediate_size`  width of each expert, and of the shared
                                                            expert.
    `expert_hidden_size`   width that experts read, behind a projection to it; 0: hidden_size.
    `gated_shared_expert`  the shared expert has a gate of its own.
    `other_parameters`     of all layers, beside these: adapters, and projections of layers that
                           read the KV of others.
    `repeated_parameters`  of all layers, those that are the weights of another layer and stored
                           once (Zamba2).
    `table_parameters`     of further embedding tables, of which a token reads one row (Gemma 3n).
    `*_itemsize`           bytes per number: weights, KV, recurrent state (Qwen3.5 keeps fp32), conv
                           state.
    `expert_itemsize`      bytes per weight of an expert; 0: as other weights.
    `block_size`           least tokens of a block, which the kernels of vLLM need; other blocks are
                           multiples of it.
    `grid`                 resumable states lie at multiples of it, in tokens: the scan kernel's
                           chunk; 1: anywhere.
    """

    name: str = ""
    attention_layers: int = 0
    readers: int = 0
    attention_first: bool = False
    recurrent_layers: int = 0
    recurrence: str = "gated_delta_net"
    hidden_size: int = 0
    intermediate_size: int = 0
    mlp_layers: int = 0
    mlp_matrices: int = 3
    vocab_size: int = 0
    attention_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_size: int = 0
    pair_size: int = 0
    attention_parameters: int = 0
    indexed_layers: int = 0
    index_layers: int = 0
    index_bytes: int = 0
    index_pair_size: int = 0
    index_parameters: int = 0
    selected: int = 0
    local: list[LocalLayers] = field(default_factory=list)
    packed: list[PackedEntries] = field(default_factory=list)
    gated_attention: bool = False
    tied_embeddings: bool = False
    recurrent_key_heads: int = 0
    recurrent_value_heads: int = 0
    recurrent_key_dim: int = 0
    recurrent_value_dim: int = 0
    conv_kernel: int = 0
    recurrent_parameters: int = 0
    exports_states: bool = False
    expert_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    expert_hidden_size: int = 0
    gated_shared_expert: bool = True
    other_parameters: int = 0
    repeated_parameters: int = 0
    table_parameters: int = 0
    weight_itemsize: int = 2
    expert_itemsize: float = 0.0
    kv_itemsize: int = 2
    state_itemsize: int = 4
    conv_itemsize: int = 2
    block_size: int = 16
    grid: int = 1

    def __post_init__(self) -> None:
        for key, value in ((size.name, getattr(self, size.name)) for size in fields(self)):
            # sizes of layers that the model lacks, too
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"model.{key} is {value}, expected 0 or more.")
        one_of("model.recurrence", self.recurrence, RECURRENCES)
        keys = _ALWAYS_POSITIVE + (_POSITIVE_IF_HYBRID if self.is_hybrid else ())
        keys += _STATE_SIZES if self.is_hybrid and self.kind_of_recurrence.per_number else ()
        keys += _EXPERT_SIZES if self.expert_layers else ()
        keys += () if self.local else ("attention_layers",)
        keys += (
            ("index_layers", "index_bytes", "index_pair_size", "selected")
            if self.indexed_layers
            else ()
        )
        for key in (
            *keys,
            "mlp_matrices",
            *(("intermediate_size",) if self.expert_layers < self.num_mlps else ()),
        ):
            if getattr(self, key) < 1:
                raise ValueError(
                    f"model.{key} is {getattr(self, key)} in {self.name!r}, expected a positive integer."
                )
        self._check_divides("attention_heads", "kv_heads")
        if self.is_hybrid and self.recurrent_key_heads:
            self._check_divides("recurrent_value_heads", "recurrent_key_heads")
        self._check_at_most("expert_layers", "num_mlps")
        self._check_at_most("indexed_layers", "attention_layers")
        self._check_at_most("index_layers", "indexed_layers")
        if self.local and (self.is_hybrid or self.indexed_layers):
            other = "recurrent_layers" if self.is_hybrid else "indexed_layers"
            raise ValueError(
                f"model.{other} is {getattr(self, other)} beside model.local, expected one of both: the sizes of their "
                "blocks are not modelled together."
            )
        if self.packed and (self.local or self.is_hybrid or self.indexed_layers):
            raise ValueError(
                "model.packed beside model.local, recurrent or indexed layers: expected one of them."
            )
        self._check_at_most("experts_per_token", "experts")

    def _check_at_most(self, key: str, limit_key: str) -> None:
        limit = getattr(self, limit_key)
        if getattr(self, key) > limit:
            raise ValueError(
                f"model.{key} is {getattr(self, key)}, expected at most {limit_key} ({limit})."
            )

    def _check_divides(self, key: str, divisor_key: str) -> None:
        value, divisor = getattr(self, key), getattr(self, divisor_key)
        if value % divisor:
            raise ValueError(
                f"model.{key} is {value}, expected a multiple of {divisor_key} ({divisor})."
            )

    @property
    def is_hybrid(self) -> bool:
        """Whether a prefix can be resumed only at a stored recurrent state."""
        return self.recurrent_layers > 0

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return (
            self.attention_layers + self.recurrent_layers + sum(kind.layers for kind in self.local)
        )

    @property
    def num_mlps(self) -> int:
        """Number of SwiGLU blocks and mixtures of experts."""
        return self.mlp_layers or self.num_layers + self.readers + sum(
            kind.readers for kind in self.local
        )

    @property
    def kind_of_recurrence(self) -> Recurrence:
        """What a token computes in a recurrent layer, and what of it is stored."""
        return RECURRENCES[self.recurrence]

    @property
    def has_latents(self) -> bool:
        """Whether attention layers store something other than keys and values of every KV head."""
        return self.kv_size > 0 or self.indexed_layers > 0 or bool(self.packed)

    @property
    def has_windows(self) -> bool:
        """Whether some layers keep the KV of a window or a chunk alone."""
        return bool(self.local or self.packed)

    # Bytes in a cache.

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes per token of one attention layer: (kv_size or 2 · kv_heads · head_dim) ·
        kv_itemsize."""
        return (self.kv_size or 2 * self.kv_heads * self.head_dim) * self.kv_itemsize

    @cached_property
    def full_bytes_per_token(self) -> int:
        """Bytes per token of the layers that read all tokens, and of the keys by which they choose
        them."""
        if self.packed:
            return ceil(sum(entries.bytes_per_token for entries in self.packed if not entries.span))
        return self.attention_layers * self.layer_kv_bytes + self.index_layers * self.index_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token that all attention layers read: attention_layers ·
        layer_kv_bytes.

        Layers of windows and chunks hold them for a while only.
        """
        if self.packed:
            return ceil(
                sum(entries.bytes_per_token for entries in self.packed if entries.pair_size)
            )
        return self.full_bytes_per_token + self.kv_itemsize * sum(
            kind.layers * kind.kv_size for kind in self.local
        )

    @property
    def drafter_layer_bytes(self) -> int:
        """Bytes per token of a layer of a drafter: of the kind that drafts, else of those that read
        all tokens."""
        for entries in self.packed:
            if entries.drafts:
                return -(-entries.page_bytes // entries.block_size)
        for kind in self.local:
            if kind.drafts:
                return kind.kv_size * self.kv_itemsize
        return (
            self.layer_kv_bytes
            if self.attention_layers
            else self.kv_bytes_per_token // self.num_layers
        )

    @property
    def has_own_drafter(self) -> bool:
        """Whether the layers of a drafter are of another kind than those that read all tokens."""
        return any(kind.drafts for kind in self.local) or any(
            entries.drafts for entries in self.packed
        )

    @property
    def context_bytes_per_token(self) -> int:
        """Bytes that a decode reads per token before it, however many there are."""
        if self.packed:
            return ceil(sum(entries.bytes_per_token for entries in self._read_whole))
        return (
            self.full_bytes_per_token + (self.readers - self.indexed_layers) * self.layer_kv_bytes
        )

    @property
    def _read_whole(self) -> list[PackedEntries]:
        """Tables of which a query reads the entries of all tokens before it."""
        return [
            entries
            for entries in self.packed
            if entries.pair_size and not (entries.span or entries.chosen)
        ]

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint, recurrent and conv state together; 0 for an attention-only
        model.

        Recurrent: recurrent_layers · value_heads · d_k · d_v · state_itemsize. Conv:
        recurrent_layers · channels · (conv_kernel − 1) · conv_itemsize, with channels = 2 ·
        key_heads · d_k + value_heads · d_v, or those of values alone: the inputs that the next
        output needs, as servers and this engine store them. A tensor of transformers has one column
        more.
        """
        return (
            self.recurrent_layers * self._state_size * self.state_itemsize + self.conv_state_bytes
        )

    @property
    def conv_state_bytes(self) -> int:
        """Bytes of the conv states of all recurrent layers, a part of `state_bytes`."""
        return self.recurrent_layers * (self.conv_kernel - 1) * self._conv_column_bytes

    @property
    def state_groups(self) -> int:
        """Groups of recurrent layers; 0 without recurrent layers.

        vLLM gives every group of layers a block of the same pool, so one state takes one block per
        group.
        """
        return self.count_state_groups()

    def count_state_groups(self, draft_layers: int = 0) -> int:
        """Return the groups of recurrent layers beside a drafter with `draft_layers` attention
        layers."""
        return (
            -(-self.recurrent_layers // self.layers_per_group(draft_layers))
            if self.is_hybrid
            else 0
        )

    def layers_per_group(self, draft_layers: int = 0) -> int:
        """Return the layers of one kind that share a block."""
        return layers_per_group(self.attention_layers + draft_layers, self.recurrent_layers)

    def block_tokens_per_state(self, multiple: int, drafts: int = 0) -> int:
        """The least multiple of `multiple` tokens whose KV in one layer is no smaller than one
        layer's state."""
        return block_tokens(self.layer_kv_bytes, self.layer_state_bytes(drafts), multiple)

    def layer_state_bytes(self, drafts: int = 0) -> int:
        """Return the bytes of one layer's state.

        With `drafts` tokens drafted ahead of a step, a conv state has as many further inputs (vLLM
        0.32.0).
        """
        return self.state_bytes // self.recurrent_layers + drafts * self._conv_column_bytes

    @property
    def _state_size(self) -> int:
        return self.recurrent_value_heads * self.recurrent_key_dim * self.recurrent_value_dim

    @property
    def _value_channels(self) -> int:
        return self.recurrent_value_heads * self.recurrent_value_dim

    @property
    def _conv_column_bytes(self) -> int:
        return self._conv_channels * self.conv_itemsize

    @property
    def _conv_channels(self) -> int:
        keys = (
            2
            * self.recurrent_key_heads
            * self.recurrent_key_dim
            * self.kind_of_recurrence.convolves_keys
        )
        return keys + self._value_channels

    # Weights.

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of all layers that can multiply an activation; norms and biases, under 0.1 %,
        are left out.

        Weights that several layers have in common count once.
        """
        mixers = (
            self.attention_layers * self._attention_parameters
            + self.recurrent_layers * self._recurrent_parameters
        )
        mixers += sum(kind.layers * kind.parameters for kind in self.local)
        mixers += sum(entries.layers * entries.parameters for entries in self.packed)
        mixers += self.index_layers * self.index_parameters
        dense = (
            (self.num_mlps - self.expert_layers)
            * self.mlp_matrices
            * self.hidden_size
            * self.intermediate_size
        )
        others = self.other_parameters - self.repeated_parameters
        return (
            mixers
            + dense
            + self.expert_layers * self._shared_parameters
            + self.expert_parameters
            + others
        )

    @cached_property
    def active_layer_parameters(self) -> int:
        """Parameters of all layers that multiply one token, with only its active experts; weights
        in common repeat."""
        unused = (
            self.expert_parameters * (self.experts - self.experts_per_token) // max(1, self.experts)
        )
        return self.layer_parameters - unused + self.repeated_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers: expert_layers · experts · mlp_matrices · width
        read · width."""
        matrix = (self.expert_hidden_size or self.hidden_size) * self.expert_intermediate_size
        return self.expert_layers * self.experts * self.mlp_matrices * matrix

    @property
    def expert_bytes(self) -> float:
        """Bytes of all experts of all layers."""
        return self.expert_parameters * (self.expert_itemsize or self.weight_itemsize)

    @property
    def unchosen_share(self) -> float:
        """Share of a layer's experts that one token does not activate: 1 − experts_per_token /
        experts, or 0.

        For n tokens with independent uniform routing, share ** n is the expected share of experts
        that none activates.
        """
        return 1 - self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def _shared_parameters(self) -> int:
        # The router, the shared expert with its output gate, and projections to the width of
        # experts and back.
        gate = self.gated_shared_expert and self.shared_intermediate_size > 0
        shared = self.mlp_matrices * self.shared_intermediate_size + gate
        return self.hidden_size * (self.experts + shared + 2 * self.expert_hidden_size)

    @property
    def _attention_parameters(self) -> int:
        if self.attention_parameters:
            return self.attention_parameters
        # q (and its gate), k, v, output.
        heads = (3 if self.gated_attention else 2) * self.attention_heads + 2 * self.kv_heads
        return self.hidden_size * heads * self.head_dim

    @property
    def _recurrent_parameters(self) -> int:
        if self.recurrent_parameters:
            return self.recurrent_parameters
        # q, k, v; output gate z and output; decay a and write strength b, one number per head;
        # depthwise convolution.
        projected = self._conv_channels + 2 * self._value_channels + 2 * self.recurrent_value_heads
        return self.hidden_size * projected + self._conv_channels * self.conv_kernel

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head: vocab_size · hidden_size."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding table: vocab_size · hidden_size, or 0 if the output head
        shares it."""
        return 0 if self.tied_embeddings else self.head_parameters

    @property
    def parameters(self) -> int:
        """Matrix parameters of layers and output head, without the embedding table."""
        return self.layer_parameters + self.head_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory, the embedding table included."""
        others = (
            self.parameters
            + self.embedding_parameters
            + self.table_parameters
            - self.expert_parameters
        )
        return int(others * self.weight_itemsize + self.expert_bytes)

    # FLOPs; a multiply-add counts two.

    @cached_property
    def linear_flops_per_token(self) -> int:
        """FLOPs per computed token that do not depend on its position: 2 · active_layer_parameters
        + recurrence.

        Recurrence, per layer: 7 · d_k · d_v per value head of GatedDeltaNet, and so on by the
        operations of `RECURRENCES`. The chunked form of prefill multiplies differently but stays
        within the same few percent of the whole.
        """
        recurrence = self.kind_of_recurrence.flops(self._state_size, self._conv_channels)
        return 2 * self.active_layer_parameters + self.recurrent_layers * recurrence

    @property
    def head_flops(self) -> int:
        """FLOPs of one row of logits: 2 · head_parameters."""
        return 2 * self.head_parameters

    @property
    def projection_flops_per_token(self) -> int:
        """FLOPs per token of the query, key and value projections of one attention layer."""
        heads = (2 if self.gated_attention else 1) * self.attention_heads + 2 * self.kv_heads
        return 2 * self.hidden_size * heads * self.head_dim

    @cached_property
    def attention_flops_per_pair(self) -> int:
        """FLOPs per query-key pair, score and weighted value, of the layers that read all tokens.

        2 · (pair_size or 2 · attention_heads · head_dim) · layers; those that choose tokens score
        all of them.
        """
        if self.packed:
            return sum(entries.flops_per_pair for entries in self._read_whole)
        dense = (self.attention_layers + self.readers - self.indexed_layers) * self.layer_pair_size
        return 2 * (dense + self.index_layers * self.index_pair_size)

    @property
    def layer_pair_size(self) -> int:
        """Multiplications per query-key pair of one attention layer."""
        return self.pair_size or 2 * self.attention_heads * self.head_dim

    @cached_property
    def bounded(self) -> tuple[BoundedReads, ...]:
        """Reads of a bounded number of tokens per query: of windows and chunks, and of chosen
        tokens."""
        kinds = []
        for kind in self.local:
            layers = kind.layers + kind.readers
            read = layers * kind.kv_size * self.kv_itemsize
            kinds.append(BoundedReads(kind.reach, kind.span, 2 * kind.pair_size * layers, read))
        for entries in self.packed:
            if entries.pair_size and (reach := entries.span or entries.chosen * entries.tokens):
                kinds.append(
                    BoundedReads(
                        "window", reach, entries.flops_per_pair, ceil(entries.bytes_per_token)
                    )
                )
        if self.indexed_layers:
            flops = 2 * self.layer_pair_size * self.indexed_layers
            read = self.indexed_layers * self.layer_kv_bytes
            kinds.append(BoundedReads("window", self.selected, flops, read))
        return tuple(kinds)

    @overload
    def prefill_flops(self, start: int, stop: int) -> int: ...
    @overload
    def prefill_flops(self, start: Positions, stop: Positions | int) -> Counts: ...
    @overload
    def prefill_flops(self, start: int, stop: Positions) -> Counts: ...
    def prefill_flops(self, start: Positions | int, stop: Positions | int) -> Counts | int:
        """FLOPs to compute prompt tokens [start, stop) on top of `start` reused ones, without the
        output head.

        linear_flops_per_token · (stop − start) + attention_flops_per_pair · causal_pairs(start,
        stop), and the pairs of windows, chunks and chosen tokens; arrays of positions give arrays
        (int64: prompts under some 10 million tokens).
        """
        first, last = _wide(start), _wide(stop)
        pairs = (last * (last + 1) - first * (first + 1)) // 2
        flops = self.linear_flops_per_token * (last - first) + self.attention_flops_per_pair * pairs
        for reads in self.bounded:
            flops = flops + reads.pair_flops * local_pairs(reads.reach, reads.span, first, last)
        return flops


# ------------------------------------------------------------------------------
# Measured peak rates of a device.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """FLOPs per second of a matrix product, bytes per second that a copy reads and writes
    together."""

    flops_per_s: float
    bytes_per_s: float


# ------------------------------------------------------------------------------
# Peak rates of a device, and the assumed share of each that steps reach.
# ------------------------------------------------------------------------------


# Not frozen, because OmegaConf makes a frozen schema read-only and YAML could not extend it;
# nothing assigns to it.
@dataclass
class HardwareSpec:
    """Data-sheet peaks of one device and the assumed share of each that a step reaches.

    `name`                   the device's name.
    `peak_flops`             dense bf16 matrix FLOPs per second (no sparsity).
    `bandwidth_bytes_per_s`  peak memory bandwidth.
    `memory_gib`             memory in 2^30 bytes, nominal: a server leaves room for weights and
                             workspace.
    `*_efficiency`           reached share of the peak, in (0, 1].
    `host_s`                 seconds that every step costs whatever it computes: scheduling,
                             launches, sampling.
    `compute_capability`     CUDA's, times ten: 90 is Hopper; 0 where it is unknown.
    """

    name: str = ""
    peak_flops: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    memory_gib: float = 0.0
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    host_s: float = 0.002
    compute_capability: int = 0

    def __post_init__(self) -> None:
        for key in ("peak_flops", "bandwidth_bytes_per_s", "memory_gib"):
            positive(f"hardware.{key}", getattr(self, key))
        for key in ("compute_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(
                    f"hardware.{key}={getattr(self, key)}: expected a share above 0 and up to 1"
                )
        not_negative("hardware.host_s", self.host_s)

    @property
    def flops_per_s(self) -> float:
        """FLOPs per second that a step is assumed to reach."""
        return self.peak_flops * self.compute_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a step is assumed to move."""
        return self.bandwidth_bytes_per_s * self.bandwidth_efficiency


# ------------------------------------------------------------------------------
# Number formats of weights and KV, for engines that quantise them.
# ------------------------------------------------------------------------------

#: Bytes of a weight over those of the model's own format, and how much faster tensor cores multiply
#: it. int4: scales of two bytes for each 128 weights, which are unpacked before they are
#: multiplied.
WEIGHTS = {"model": (1.0, 1.0), "fp8": (0.5, 2.0), "int4": (0.25 + 1 / 128, 1.0)}
#: Bytes of a number of KV over those of the model's own format; int4 with scales of two bytes for
#: each 128.
KV = {"model": 1.0, "fp8": 0.5, "int4": 0.25 + 1 / 128}


# ------------------------------------------------------------------------------
# Costs: the price of computing tokens of a prompt, which reusing them saves.
#
# Placements and eviction orders compare entries by it. Each has a default cost, that of its
# source; an arm may name another one for all its rules. Only ratios of costs decide, so the
# unit of a cost does not matter.
# ------------------------------------------------------------------------------


class Cost(Protocol):
    """The price of computing prompt tokens `[start, stop)` on top of `start` reused ones;
    elementwise.

    Positive where there is a token, and additive: the prices of [a, b) and [b, c) add up to that of
    [a, c).
    """

    @overload
    def __call__(self, start: int, stop: int, /) -> float: ...
    @overload
    def __call__(self, start: int, stop: Positions, /) -> NDArray[Any]: ...


#: From the name of a rule's default cost, the cost that the rule uses: the arm's, where it names
#: one.
CostOf = Callable[[str], Cost]
#: `model` is the study's.
COSTS: Registry[Cost] = Registry("cost", given=("model",))
#: A need of placements and eviction orders: they compare entries by the arm's cost.
COST = "cost"


def in_tokens(usual: str) -> Cost:
    """Return the cost that counts tokens, whatever the default."""
    return tokens()


@COSTS.register("flops")
def flops(*, model: ModelSpec) -> Cost:
    """`flops`: the model's FLOPs, those of attention by depth; without the output head."""
    return model.prefill_flops


@COSTS.register("seconds")
def seconds(
    token_s: Annotated[float, not_negative, "seconds of a computed token"],
    pair_s: Annotated[float, not_negative, "seconds of a query-key pair"],
) -> Cost:
    """`seconds`: `token_s` per computed token and `pair_s` per query-key pair, as a calibrated
    profile has them.

    A device does not run attention at the rate of its matrix products. What a step takes however
    much it computes (weights, launches) is left out: it is paid with or without reuse.
    """
    if token_s + pair_s <= 0:
        raise ValueError(
            f"cost_options.token_s={token_s} with pair_s={pair_s}: expected one of both above 0"
        )

    def cost(start: int, stop: Any, /) -> Any:
        return token_s * (stop - start) + pair_s * causal_pairs(start, stop)

    return cost


@COSTS.register("tokens")
def tokens() -> Cost:
    """`tokens`: computing any token costs the same, as in hit rates."""
    return _length


def _length(start: int, stop: Any, /) -> Any:
    return stop - start
