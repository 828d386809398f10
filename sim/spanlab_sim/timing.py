"""Timing models: how long a step takes, told from what it does, never from a clock."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.model_spec import ModelSpec
from spanlab_sim.hardware import HardwareSpec

Nanoseconds = NDArray[np.int64]


class StepFeatures(NamedTuple):
    """What one step does, in integers: all that a timing model may know of it."""

    prefill_tokens: int = 0  #: prompt tokens computed in this step
    prefill_pairs: int = 0  #: their causal query-key pairs: over chunks, the sum of t + 1 for t in [start, stop)
    num_prefills: int = 0  #: prefill chunks
    num_decodes: int = 0  #: sequences that decode one token
    decode_context: int = 0  #: KV tokens that those read, their own new token included, summed over sequences
    num_first_tokens: int = 0  #: chunks that finish a prompt, and so need a row of logits
    loaded_state_bytes: int = 0  #: checkpoints read from the cache
    captured_state_bytes: int = 0  #: checkpoints written to the cache
    prefill_context: int = 0  #: KV tokens that the chunks' queries read and that are not computed with them
    shallow_token_layers: int = 0  #: tokens that a measured repair does not choose, times the layers they pass whole
    shallow_pair_layers: int = 0  #: their query-key pairs, times those layers
    copied_tokens: int = 0  #: tokens of spans that a request copies for itself, turned to their place
    num_forwards: int = 0  #: runs through the model in turn: more than one where spans are copied or repaired
    span_reads: int = 0  #: runs of keys that must be read one by one, each by queries turned for it (kernel QR)
    turned_keys: int = 0  #: keys that are turned as they are read (kernel KR)
    scan_runs: int = 0  #: runs of recurrent layers in turn: one per piece between captures, one for all single rows
    scan_chunks: int = 0  #: chunks of the grid's length that those pieces are cut into, the last ones padded
    projected_tokens: int = 0  #: tokens of which one layer further computes query, key and value, and nothing else


class TimingModel(Protocol):
    """Durations of steps from their features, in whole nanoseconds, so that jumping and stepping agree exactly."""

    def step(self, features: StepFeatures) -> int:
        """Nanoseconds that one step takes."""
        ...

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Durations, shape (k,), of k steps of which each adds num_decodes to decode_context.

        span(f, k)[i] == step(f with decode_context + i · num_decodes), to the nanosecond.
        """
        ...


class ConstantTiming:
    """A fixed price per computed token and per step: for queueing closed forms and the published replica.

    Seconds: seconds_per_step + prefill_tokens · seconds_per_computed_token + num_decodes · seconds_per_decode_token.
    A step without work costs seconds_per_step, 0 unless set.
    """

    __slots__ = ("_computed_ns", "_decode_ns", "_step_ns")

    def __init__(
        self,
        seconds_per_computed_token: float,
        seconds_per_step: float = 0.0,
        seconds_per_decode_token: float | None = None,
    ) -> None:
        decode = seconds_per_computed_token if seconds_per_decode_token is None else seconds_per_decode_token
        self._computed_ns = _nanoseconds("seconds_per_computed_token", seconds_per_computed_token)
        self._decode_ns = _nanoseconds("seconds_per_decode_token", decode)
        # The half rounds to the nearest nanosecond where int() cuts off.
        self._step_ns = _nanoseconds("seconds_per_step", seconds_per_step) + 0.5

    def step(self, features: StepFeatures) -> int:
        """Nanoseconds that one step takes."""
        work_ns = features.prefill_tokens * self._computed_ns + features.num_decodes * self._decode_ns
        return int(work_ns + self._step_ns)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Durations of k such steps: all equal, for the price ignores the context."""
        return np.full(k, self.step(features), dtype=np.int64)


def _nanoseconds(key: str, seconds: float) -> float:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"timing.{key} is {seconds}, expected seconds, 0 or more.")
    return seconds * 1e9


class RooflineTiming:
    """The slower of computing and moving bytes, at assumed shares of the device's peaks, plus a host time per step.

    seconds = max(FLOPs / flops_per_s, bytes / bytes_per_s) + host_s
    FLOPs = linear · (prefill_tokens + num_decodes) + per pair · (prefill_pairs + decode_context) + head · logit rows
    bytes = layer weights, and the head's if a row of logits is due, once per step
          + KV · (prefill_context + decode_context read, prefill_tokens + num_decodes written)
          + state · 2 (read, written) · (num_prefills + num_decodes) + loaded + captured states
    A measured repair adds its shallow tokens and pairs at one layer's share each, and one layer's projections of query,
    key and value for tokens that it then filters; a copied token is read and written.
    Logit rows = num_decodes + num_first_tokens. Left out: activations, and keys that a chunk reads again tile by tile.
    A step without work still costs the weights and host_s, so a server should not run one. Without calibration this
    ranks policies; it does not predict a server's latency.
    """

    __slots__ = (
        "_head_bytes",
        "_head_flops",
        "_host_ns",
        "_kv_bytes",
        "_layers",
        "_linear_flops",
        "_ns_per_byte",
        "_ns_per_flop",
        "_pair_flops",
        "_projection_flops",
        "_state_bytes",
        "_weight_bytes",
    )

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self._ns_per_flop = 1e9 / hardware.flops_per_s
        self._ns_per_byte = 1e9 / hardware.bytes_per_s
        self._host_ns = hardware.host_s * 1e9 + 0.5  # the half rounds to the nearest nanosecond where int() cuts off
        self._linear_flops = model.linear_flops_per_token
        self._pair_flops = model.attention_flops_per_pair
        self._head_flops = model.head_flops
        self._weight_bytes = model.layer_parameters * model.weight_itemsize
        self._head_bytes = model.head_parameters * model.weight_itemsize
        self._kv_bytes = model.kv_bytes_per_token
        self._state_bytes = 2 * model.state_bytes
        self._layers = model.num_layers
        self._projection_flops = model.projection_flops_per_token

    def step(self, features: StepFeatures) -> int:
        """Nanoseconds that one step takes."""
        flops, moved = self._work(features)
        return int(max(flops * self._ns_per_flop, moved * self._ns_per_byte) + self._host_ns)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Durations of k steps with growing context: the greater of two straight lines at every step."""
        flops, moved = self._work(features)
        more = np.arange(k) * features.num_decodes
        compute_ns = (more * self._pair_flops + flops) * self._ns_per_flop
        memory_ns = (more * self._kv_bytes + moved) * self._ns_per_byte
        slower = np.maximum(compute_ns, memory_ns, out=compute_ns)
        slower += self._host_ns
        durations: Nanoseconds = slower.astype(np.int64)
        return durations

    def _work(self, features: StepFeatures) -> tuple[int, int]:
        # Whole numbers up to here: Python and NumPy then round the same way, which makes span equal step exactly.
        prefilled, pairs, chunks, decodes, context, first_tokens, loaded, captured, before, *rest = features
        computed, rows = prefilled + decodes, decodes + first_tokens
        flops = self._linear_flops * computed + self._pair_flops * (pairs + context) + self._head_flops * rows
        moved = self._weight_bytes + self._kv_bytes * (before + context + computed) + loaded + captured
        if rows:
            moved += self._head_bytes
        shallow, shallow_pairs, copied, *_ = rest
        if shallow:
            flops += (self._linear_flops * shallow + self._pair_flops * shallow_pairs) // self._layers
        flops += self._projection_flops * features.projected_tokens
        moved += 2 * self._kv_bytes * copied
        return flops, moved + self._state_bytes * (chunks + decodes)
