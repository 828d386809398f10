"""The timing model `fitted`: physical counts of a step times a few rates that follow from a server's log."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from pathlib import Path

import numpy as np

from spanlab.core.step_features import StepFeatures
from spanlab.model_spec import ModelSpec
from spanlab_sim.deployment import KV, WEIGHTS, Deployment
from spanlab_sim.fitted_profile import FittedProfile, Rates, read_fitted
from spanlab_sim.hardware import HardwareSpec
from spanlab_sim.timing import Nanoseconds, TimingModel
from spanlab_sim.timings import TIMINGS

SHARPNESS = 8  #: of the soft maximum (a^p + b^p)^(1/p): at a = b it is 9 % above both
COLLECTIVES_PER_LAYER = 2


@TIMINGS.register("fitted")
def fitted(profile: str, *, model: ModelSpec, hardware: HardwareSpec) -> TimingModel:
    """What the entry twin fitted to a server's log; `profile` is the file that it wrote."""
    loaded = read_fitted(Path(profile))
    _check(loaded, profile, model, hardware)
    return FittedTiming(model, hardware, loaded.deployment, loaded.rates(hardware))


def _check(loaded: FittedProfile, profile: str, model: ModelSpec, hardware: HardwareSpec) -> None:
    loaded.deployment.check("timing.profile.deployment", model)
    for key, fitted_to, expected in (("model", loaded.model, model.name), ("hardware", loaded.hardware, hardware.name)):
        if fitted_to != expected:
            raise ValueError(f"timing.profile={profile}: it was fitted to {key} {fitted_to}; expected {key} {expected}")


class FittedTiming:
    """Compute, memory, host and collectives at fitted rates; ranks of one engine take a step together.

    seconds = max over ranks of own + experts + collectives + host_s (+ host_s_with_prefill with prompt tokens)
    own     = soft max(layer FLOPs, layer weights) + soft max(head FLOPs, head weights) if a row of logits is due
            + FLOPs of prefill pairs + bytes of KV and states + host_s_per_sequence · sequences
    experts = soft max(their FLOPs, those that routing · tokens are expected to choose independently: RooflineTiming)
    collectives, two per layer: all-reduces of a rank's tokens between `tensor_parallel` devices, each moving
            2 (t − 1) / t of them; a gathering and a scattering of all ranks' tokens between `data_parallel` ranks
    Tokens of a step are padded to captured CUDA graphs before they are multiplied. Reading spans at other positions is
    refused: no log of such a server has been seen.
    """

    __slots__ = (
        "_deployment",
        "_expert_bytes_ns",
        "_expert_ns",
        "_gather_ns",
        "_head_bytes_ns",
        "_head_ns",
        "_kv_ns",
        "_layer_bytes_ns",
        "_layer_ns",
        "_ns_per_byte",
        "_pair_ns",
        "_prefill_ns",
        "_sequence_ns",
        "_state_ns",
        "_step_ns",
        "_unchosen_share",
    )

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, deployment: Deployment, rates: Rates) -> None:
        scale, speed = WEIGHTS[deployment.weights]
        tensor = deployment.tensor_parallel
        ns_per_flop = 1e9 / (hardware.peak_flops * rates.compute * tensor)
        self._ns_per_byte = 1e9 / (hardware.bandwidth_bytes_per_s * rates.bandwidth * tensor)
        self._deployment = deployment
        dense = model.layer_parameters - model.expert_parameters
        active_experts = model.active_layer_parameters - dense
        reduce_ns, self._gather_ns, latency_ns = _collectives(model, deployment, rates)
        self._layer_ns = (model.linear_flops_per_token - 2 * active_experts) * ns_per_flop / speed + reduce_ns
        self._layer_bytes_ns = dense * model.weight_itemsize * scale * self._ns_per_byte
        self._head_ns = model.head_flops * ns_per_flop
        self._head_bytes_ns = model.head_parameters * model.weight_itemsize * self._ns_per_byte
        self._pair_ns = model.attention_flops_per_pair * ns_per_flop
        self._kv_ns = model.kv_bytes_per_token * KV[deployment.kv] * self._ns_per_byte
        self._state_ns = 2 * model.state_bytes * self._ns_per_byte
        ranks = deployment.data_parallel
        self._expert_ns = 2 * active_experts * ns_per_flop / (speed * rates.experts * ranks)
        self._expert_bytes_ns = model.expert_parameters * model.weight_itemsize * scale * self._ns_per_byte / ranks
        self._unchosen_share = model.unchosen_share**rates.routing
        self._sequence_ns = rates.host_s_per_sequence * 1e9
        self._prefill_ns = rates.host_s_with_prefill * 1e9
        # The half rounds to the nearest nanosecond where int() cuts off.
        self._step_ns = rates.host_s * 1e9 + latency_ns + 0.5

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of a step that all ranks do alike."""
        return self.step_together([features] * self._deployment.data_parallel)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k steps with growing context: one straight line."""
        return self.span_together([features] * self._deployment.data_parallel, k)

    def step_together(self, ranks: Ordered[StepFeatures]) -> int:
        """Return the nanoseconds of a step in which every rank has different work."""
        return int(self.exact(ranks))

    def exact(self, ranks: Ordered[StepFeatures]) -> float:
        """Return the nanoseconds before truncation, half a nanosecond more than the step takes."""
        slowest = max([rank.decode_context * self._kv_ns + self._rank_ns(rank) for rank in ranks])
        return slowest + self._shared_ns(ranks)

    def span_together(self, ranks: Ordered[StepFeatures], k: int) -> Nanoseconds:
        """Return the durations of k such steps: the greatest of the ranks' straight lines."""
        later = np.arange(k)
        # As in `step_together`, one product and the same sums of the same numbers, so that both round the same way.
        lines = [(later * rank.num_decodes + rank.decode_context) * self._kv_ns + self._rank_ns(rank) for rank in ranks]
        durations: Nanoseconds = (np.maximum.reduce(lines) + self._shared_ns(ranks)).astype(np.int64)
        return durations

    def _rank_ns(self, features: StepFeatures) -> float:
        """Return the nanoseconds of a rank's separate work, without its decodes' context."""
        f = features
        if f.reads_spans:
            raise ValueError("timing=fitted with an arm that reuses spans: expected timing=roofline or calibrated")
        computed, rows = f.prefill_tokens + f.num_decodes, f.num_decodes + f.num_first_tokens
        nanoseconds = _soft_max(self._deployment.padded(computed) * self._layer_ns, self._layer_bytes_ns)
        if rows:
            nanoseconds += _soft_max(rows * self._head_ns, self._head_bytes_ns)
        nanoseconds += f.prefill_pairs * self._pair_ns + (f.prefill_context + computed) * self._kv_ns
        sequences = f.num_prefills + f.num_decodes
        nanoseconds += (f.loaded_state_bytes + f.captured_state_bytes) * self._ns_per_byte
        return nanoseconds + sequences * (self._state_ns + self._sequence_ns)

    def _shared_ns(self, ranks: Ordered[StepFeatures]) -> float:
        """Return the nanoseconds of the work that all ranks do together or wait for."""
        prefills = sum([rank.num_prefills for rank in ranks])
        shared = self._step_ns + (self._prefill_ns if prefills else 0.0)
        if not self._expert_ns:
            return shared
        tokens = sum([self._deployment.padded(rank.prefill_tokens + rank.num_decodes) for rank in ranks])
        chosen = self._expert_bytes_ns * (1 - self._unchosen_share**tokens)
        return shared + _soft_max(tokens * self._expert_ns, chosen) + tokens * self._gather_ns


def _collectives(model: ModelSpec, deployment: Deployment, rates: Rates) -> tuple[float, float, float]:
    """Return nanoseconds per token of a rank, per token of all ranks, and per step."""
    row = COLLECTIVES_PER_LAYER * model.hidden_size * 2 / rates.link_bytes_per_s * 1e9  # activations have two bytes
    tensor, data = deployment.tensor_parallel, deployment.data_parallel
    reduced = model.num_layers * row * 2 * (tensor - 1) / tensor
    gathered = model.expert_layers * row * (data - 1) / data
    times = model.num_layers * (tensor > 1) + model.expert_layers * (data > 1)
    return reduced, gathered, COLLECTIVES_PER_LAYER * times * rates.collective_s * 1e9


def _soft_max(compute_ns: float, memory_ns: float) -> float:
    """Return slightly more than the greater time where both are close: neither hides the other completely."""
    greater, less = (compute_ns, memory_ns) if compute_ns > memory_ns else (memory_ns, compute_ns)
    share: float = (1 + (less / greater) ** SHARPNESS) ** (1 / SHARPNESS)
    return greater * share
