"""Timing models: the duration of a step, computed from its work, never from a clock."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.step import StepFeatures
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.registry import not_negative

Nanoseconds = NDArray[np.int64]


class TimingModel(Protocol):
    """Durations of steps from their features, in whole nanoseconds, so that jumping and stepping
    agree exactly."""

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        ...

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations, shape (k,), of k steps of which each adds num_decodes to
        decode_context.

        span(f, k)[i] == step(f with decode_context + i · num_decodes), to the nanosecond.
        """
        ...


class ConstantTiming:
    """A fixed price per computed token and per step: for queueing closed forms and the published
    replica.

    Seconds: seconds_per_step + prefill_tokens · seconds_per_computed_token + num_decodes ·
    seconds_per_decode_token. A step without work costs seconds_per_step, 0 unless set.
    """

    __slots__ = ("_computed_ns", "_decode_ns", "_step_ns")

    def __init__(
        self,
        seconds_per_computed_token: float,
        seconds_per_step: float = 0.0,
        seconds_per_decode_token: float | None = None,
    ) -> None:
        decode = (
            seconds_per_computed_token
            if seconds_per_decode_token is None
            else seconds_per_decode_token
        )
        self._computed_ns = _nanoseconds("seconds_per_computed_token", seconds_per_computed_token)
        self._decode_ns = _nanoseconds("seconds_per_decode_token", decode)
        # The half rounds to the nearest nanosecond where int() cuts off.
        self._step_ns = _nanoseconds("seconds_per_step", seconds_per_step) + 0.5

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        work_ns = (
            features.prefill_tokens * self._computed_ns + features.num_decodes * self._decode_ns
        )
        return int(work_ns + self._step_ns)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k such steps: all equal, since the price ignores the context."""
        return np.full(k, self.step(features), dtype=np.int64)


def _nanoseconds(key: str, seconds: float) -> float:
    not_negative(f"timing.{key}", seconds)
    return seconds * 1e9


#: Costs of forms of the attention kernel, by estimated cycles of a tile of 64 keys on sm_90 at
#: head_dim 128, issue and products one after another (benchmarks/kernels/static.md). Keys rotated
#: as they are read (KR) against keys stored rotated, in percent more: in prefill 2,262 to 1,722
#: cycles, in decode 765 to 392.
ROTATED_PREFILL_PERCENT = 31
ROTATED_DECODE_PERCENT = 95
#: A further span read by queries that are rotated for it (QR): 372 cycles in prefill, where 64 keys
#: take 1,702; 52 in decode, where they take 423.
KEYS_PER_PREFILL_SPAN = 14
KEYS_PER_DECODE_SPAN = 8
#: Pairs (row, head of a kv head) of a prefill from which the kernel copies spans to their final
#: positions instead.
ROTATE_ONCE_ENTRIES = 1024


class RooflineTiming:
    """The slower of computing and moving bytes, at assumed shares of the device's peaks, plus a
    host time per forward.

    seconds = max(FLOPs / flops_per_s, bytes / bytes_per_s) + forwards · host_s FLOPs = linear ·
    (prefill_tokens + num_decodes) + per pair · (prefill_pairs + decode_context) + head · logit rows
    bytes = layer weights, and the head's if a row of logits is due, once per step; of E experts per
    layer those that
            the step's n tokens are expected to choose, k each, alike and independently: E · (1 − (1 − k / E)^n)
          + KV · (prefill_context + decode_context read, prefill_tokens + num_decodes written)
          + state · 2 (read, written) · (num_prefills + num_decodes) + loaded + captured states
    Logit rows = num_decodes + num_first_tokens. Reused spans add, as the kernels read them:
    - a measured repair: its shallow tokens and pairs at one layer's share each, and one layer's
      projections of query, key and value for tokens that it then filters;
    - a copied token: one read and one write; its rotation is within the time of these bytes;
    - a further forward: the layer weights and host_s once more;
    - keys rotated as they are read: ROTATED_PREFILL_PERCENT or ROTATED_DECODE_PERCENT more per
      pair, all pairs of the step, since every tile of queries rotates the keys again; tables of
      angles stay in the cache;
    - a span read: KEYS_PER_PREFILL_SPAN or KEYS_PER_DECODE_SPAN keys more, for the mean number of
      rows that read it;
    - neither of both in a prefill of ROTATE_ONCE_ENTRIES pairs or more: one read and one write of
      the keys and values that it reads, since the kernel then copies them once;
    - a composed map, S = A · S + B per recurrent layer and value head: 2 · d_k · d_k · d_v, one
      read of A in float32, one read and write of the state. Forms other than exact cost less, which
      is left out: it is about one token;
    - a map token: a scan over d_k columns more, 7 · d_k · d_k per recurrent layer and value head.
    `added_flops` and `added_bytes` are added as they are; below zero where a replay of a state
    leaves some out. Left out: activations, keys that a chunk reads again tile by tile, and the
    masked part of a span's last tile. A step without work still costs the weights and host_s, so a
    server should not run one. Without calibration this ranks policies; it does not predict a
    server's latency.
    """

    __slots__ = (
        "_expert_bytes",
        "_further_host_ns",
        "_group",
        "_head_bytes",
        "_head_flops",
        "_host_ns",
        "_kv_bytes",
        "_layers",
        "_linear_flops",
        "_map_bytes",
        "_map_flops",
        "_map_token_flops",
        "_ns_per_byte",
        "_ns_per_flop",
        "_pair_flops",
        "_projection_flops",
        "_rotated_decode_flops",
        "_rotated_prefill_flops",
        "_state_bytes",
        "_unchosen_share",
        "_weight_bytes",
    )

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self._ns_per_flop = 1e9 / hardware.flops_per_s
        self._ns_per_byte = 1e9 / hardware.bytes_per_s
        # the half rounds to the nearest nanosecond where int() cuts off
        self._host_ns = hardware.host_s * 1e9 + 0.5
        self._further_host_ns = hardware.host_s * 1e9
        self._linear_flops = model.linear_flops_per_token
        self._pair_flops = model.attention_flops_per_pair
        self._group = model.attention_heads // max(1, model.kv_heads)
        self._rotated_prefill_flops = self._pair_flops * ROTATED_PREFILL_PERCENT // 100
        self._rotated_decode_flops = self._pair_flops * ROTATED_DECODE_PERCENT // 100
        self._head_flops = model.head_flops
        dense = (model.layer_parameters - model.expert_parameters) * model.weight_itemsize
        self._expert_bytes = int(model.expert_bytes)
        self._weight_bytes = dense + self._expert_bytes
        self._unchosen_share = model.unchosen_share
        self._head_bytes = model.head_parameters * model.weight_itemsize
        self._kv_bytes = model.context_bytes_per_token
        self._state_bytes = 2 * model.state_bytes
        transition = (
            model.recurrent_layers * model.recurrent_value_heads * model.recurrent_key_dim**2
        )
        self._map_flops = 2 * transition * model.recurrent_value_dim
        self._map_bytes = 4 * transition + self._state_bytes
        self._map_token_flops = 7 * transition
        self._layers = model.num_layers
        self._projection_flops = model.projection_flops_per_token

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        flops, moved = self._work(features)
        return int(max(flops * self._ns_per_flop, moved * self._ns_per_byte) + self._host(features))

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k steps with growing context: the greater of two straight
        lines."""
        flops, moved = self._work(features)
        earlier, decodes = np.arange(k), features.num_decodes
        more_flops = decodes * (
            self._pair_flops + (self._rotated_decode_flops if features.turned_keys else 0)
        )
        slower = (earlier * (decodes * self._kv_bytes) + moved) * self._ns_per_byte
        longest_ns = ((k - 1) * more_flops + flops) * self._ns_per_flop
        # else all steps wait for memory, as most decodes do
        if longest_ns >= moved * self._ns_per_byte:
            np.maximum(slower, (earlier * more_flops + flops) * self._ns_per_flop, out=slower)
        slower += self._host(features)
        durations: Nanoseconds = slower.astype(np.int64)
        return durations

    def _work(self, features: StepFeatures) -> tuple[int, int]:
        # Integers up to here: Python and NumPy then round the same way, so that span equals step
        # exactly.
        f = features
        computed, rows = f.prefill_tokens + f.num_decodes, f.num_decodes + f.num_first_tokens
        pairs = f.prefill_pairs + f.decode_context
        flops = self._linear_flops * computed + self._pair_flops * pairs + self._head_flops * rows
        moved = self._weights(computed) + self._kv_bytes * (
            f.prefill_context + f.decode_context + computed
        )
        moved += (
            f.loaded_state_bytes
            + f.captured_state_bytes
            + self._state_bytes * (f.num_prefills + f.num_decodes)
        )
        if rows:
            moved += self._head_bytes
        flops, moved = flops + f.added_flops, moved + f.added_bytes
        if f.reads_spans:
            span_flops, span_bytes = self._span_work(f)
            flops, moved = flops + span_flops, moved + span_bytes
        return flops, moved

    def _span_work(self, features: StepFeatures) -> tuple[int, int]:
        """Return FLOPs and bytes of reused spans beyond those of the tokens that are computed."""
        tokens, pairs = features.shallow_token_layers, features.shallow_pair_layers
        flops = (self._linear_flops * tokens + self._pair_flops * pairs) // self._layers
        flops += self._projection_flops * features.projected_tokens
        # to their final positions, in prefills of mean length
        copies_spans = bool(features.turned_keys or features.span_reads) and (
            features.prefill_tokens * self._group
            >= ROTATE_ONCE_ENTRIES * max(1, features.num_prefills)
        )
        in_kernel = (0, 0) if copies_spans else (features.prefill_pairs, features.prefill_tokens)
        flops += self._rotation_flops(features, *in_kernel)
        flops += (
            self._map_flops * features.composed_maps + self._map_token_flops * features.map_tokens
        )
        copied = features.copied_tokens + (features.prefill_context if copies_spans else 0)
        rows = features.prefill_tokens + features.num_decodes
        repeated_weights = self._weights(rows) * max(0, features.num_forwards - 1)
        return (
            flops,
            repeated_weights
            + self._map_bytes * features.composed_maps
            + 2 * self._kv_bytes * copied,
        )

    def _rotation_flops(
        self, features: StepFeatures, prefill_pairs: int, prefill_tokens: int
    ) -> int:
        """Return the FLOPs of rotating keys, or queries per span, in these prefills and in
        decodes."""
        flops = 0
        if features.turned_keys:
            flops += self._rotated_prefill_flops * prefill_pairs
            flops += self._rotated_decode_flops * features.decode_context
        keys = KEYS_PER_PREFILL_SPAN * prefill_tokens + KEYS_PER_DECODE_SPAN * features.num_decodes
        requests = max(1, features.num_prefills + features.num_decodes)
        return flops + self._pair_flops * features.span_reads * keys // requests

    def _weights(self, tokens: int) -> int:
        """Return the bytes of layer weights that a forward of `tokens` tokens reads."""
        return self._weight_bytes - int(self._expert_bytes * self._unchosen_share**tokens)

    def _host(self, features: StepFeatures) -> float:
        further = max(0, features.num_forwards - 1)
        return self._host_ns + further * self._further_host_ns
