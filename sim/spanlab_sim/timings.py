"""Registered timing models: calibrated and fitted ones, deployments and servers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from spanlab.core.step import StepFeatures
from spanlab.kinds import Kind, Kinds, check_fields, field
from spanlab.model_spec import KV, WEIGHTS, HardwareSpec, ModelSpec, block_tokens
from spanlab.registry import REQUIRED, not_negative, one_of, positive
from spanlab.typed_json import from_json, reading
from spanlab_sim.timing import ConstantTiming, Nanoseconds, RooflineTiming, TimingModel

# ------------------------------------------------------------------------------
# A timing model fitted to measured steps: a price for each kind of work, and the range in which
# it was measured.
# ------------------------------------------------------------------------------

#: The priced terms of a step, each with its count. Only `decode_context` may depend on the context
#: of decodes, since `CalibratedTiming.span` advances only this term.
TERMS: dict[str, Callable[[StepFeatures], int]] = {
    "step": lambda f: 1,
    "further_forward": lambda f: max(0, f.num_forwards - 1),
    "chunk": lambda f: f.num_prefills,
    "prefill_token": lambda f: f.prefill_tokens,
    "prefill_pair": lambda f: f.prefill_pairs,
    "prefill_context": lambda f: f.prefill_context,
    "decode": lambda f: f.num_decodes,
    "decode_context": lambda f: f.decode_context,
    "first_token": lambda f: f.num_first_tokens,
    "loaded_state_byte": lambda f: f.loaded_state_bytes,
    "captured_state_byte": lambda f: f.captured_state_bytes,
    "copied_token": lambda f: f.copied_tokens,
    "shallow_token_layer": lambda f: f.shallow_token_layers,
    "shallow_pair_layer": lambda f: f.shallow_pair_layers,
    "span_read": lambda f: f.span_reads,
    "turned_key": lambda f: f.turned_keys,
    "scan_run": lambda f: f.scan_runs,
    "scan_chunk": lambda f: f.scan_chunks,
    "projected_token": lambda f: f.projected_tokens,
    "composed_map": lambda f: f.composed_maps,
    "map_token": lambda f: f.map_tokens,
}
#: Terms, and their features, that a profile may lack: it was fitted before such steps existed.
_LATER = {"composed_map": "composed_maps", "map_token": "map_tokens"}
_LATER_FEATURES = ("added_flops", "added_bytes")
_GROWING = "decode_context"


@dataclass(frozen=True)
class Profile:
    """Prices of the work of steps of one model on one machine.

    `machine`           as a study's summary names it; `device` is cpu or the card's name
    `threads`           of torch on the CPU; `dtype` of weights, keys and values
    `coefficients`      nanoseconds for each unit of a term, by term; none below zero
    `hull`              least and greatest value of every feature among the steps measured
    `left_out`          relative errors at shapes left out of the fit: median, p95 of their
                        magnitude, signed mean
    `shapes`, `steps`   how many were measured; `longest` prompt among them, in tokens
    """

    model: str
    machine: str
    device: str
    threads: int
    dtype: str
    versions: dict[str, str]
    date: str
    commit: str
    coefficients: dict[str, float]
    hull: dict[str, tuple[int, int]]
    left_out: dict[str, float]
    shapes: int
    steps: int
    longest: int

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )


def read_profile(path: Path) -> Profile:
    """Read a profile; raises ValueError with one sentence for an invalid file."""
    with reading(f"timing.profile={path}", "a profile as the entry calibrate writes it"):
        profile = from_json(path.read_bytes(), Profile)
        coefficients, hull = dict(profile.coefficients), dict(profile.hull)
        # What a profile could not measure costs nothing, and its hull is [0, 0].
        if not coefficients.keys() & _LATER.keys():
            coefficients |= dict.fromkeys(_LATER, 0.0)
        for later in (_LATER.values(), _LATER_FEATURES):
            if not hull.keys() & set(later):
                hull |= dict.fromkeys(later, (0, 0))
        for field, given, names in (
            ("coefficients", set(coefficients), set(TERMS)),
            ("hull", set(hull), set(StepFeatures._fields)),
        ):
            if given != names:
                raise ValueError(
                    f"{field} has {', '.join(sorted(given ^ names))} too many or too few"
                )
        for name, price in coefficients.items():
            not_negative(f"coefficients.{name}", price)
        return replace(profile, coefficients=coefficients, hull=hull)


class CalibratedTiming:
    """nanoseconds = sum over terms of coefficient · count, rounded.

    It also predicts steps outside the hull. It counts predictions in `predicted`, those outside the
    hull in `outside`, and their extrapolated features in `extrapolated`. A run of equal decode
    steps counts once, as its first step.
    """

    __slots__ = ("_fixed", "_growing", "_hull", "extrapolated", "outside", "predicted")

    def __init__(self, profile: Profile) -> None:
        coefficients = {name: price for name, price in profile.coefficients.items() if price > 0}
        # 0.0 where it has no price: the product is then exact and changes nothing
        self._growing = coefficients.pop(_GROWING, 0.0)
        self._fixed = [(TERMS[name], price) for name, price in coefficients.items()]
        self._hull = [profile.hull[name] for name in StepFeatures._fields]
        self.predicted = self.outside = 0
        self.extrapolated: Counter[str] = Counter()

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        self._note(features)
        return int(features.decode_context * self._growing + self._without_context(features))

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k steps with growing context: one straight line."""
        self._note(features)
        context = np.arange(k) * features.num_decodes + features.decode_context
        # As in `step`, one product and one sum of the same numbers, so that both round the same
        # way.
        durations: Nanoseconds = (context * self._growing + self._without_context(features)).astype(
            np.int64
        )
        return durations

    def _without_context(self, features: StepFeatures) -> float:
        # The half rounds to the nearest nanosecond where int() cuts off.
        return sum([count(features) * price for count, price in self._fixed]) + 0.5

    def _note(self, features: StepFeatures) -> None:
        self.predicted += 1
        indices = [
            i
            for i, (value, (low, high)) in enumerate(zip(features, self._hull, strict=True))
            if value < low or value > high
        ]
        if indices:
            self.outside += 1
            self.extrapolated.update([features._fields[i] for i in indices])


# ------------------------------------------------------------------------------
# Timing models by name: a dataclass for each kind of `timing`, with its keys.
# ------------------------------------------------------------------------------

ReadProfile = Callable[[str | None], Profile]


@dataclass
class Timing(Kind):
    """The timing model: the duration of a step, by one of the kinds below, each with keys of its
    own."""

    def __post_init__(self) -> None:
        check_fields(self, "timing")

    def build(
        self, model: ModelSpec, hardware: HardwareSpec, read_profile: ReadProfile
    ) -> TimingModel:
        """Return the timing model of a study.

        `read_profile`  reads the profile at a path; None: that of the study's model and machine
        """
        raise NotImplementedError  # every kind has its own

    @property
    def profile(self) -> str | None:
        """File of a profile, for a kind that reads one."""
        return None


TIMINGS: Kinds[Timing] = Kinds("timing", Timing)


@dataclass
@TIMINGS.register("roofline")
class Roofline(Timing):
    """The slower of computing and moving bytes: model × hardware, uncalibrated, to rank and not to
    predict."""

    def build(
        self, model: ModelSpec, hardware: HardwareSpec, read_profile: ReadProfile
    ) -> TimingModel:
        return RooflineTiming(model, hardware)


@dataclass
@TIMINGS.register("constant")
class Constant(Timing):
    """A fixed price per computed token and per step."""

    seconds_per_computed_token: float = field(
        REQUIRED, not_negative, "seconds of a computed token", example=0.0001
    )
    seconds_per_decode_token: float | None = field(
        None,
        not_negative,
        "seconds of a decoded token; null: that of a computed token",
        example=0.0,
    )
    seconds_per_step: float | None = field(
        None, not_negative, "seconds of a step, beside its tokens; null: 0", example=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds_per_computed_token == 0 and not self.seconds_per_step:
            step = "null" if self.seconds_per_step is None else 0
            pair = f"timing.seconds_per_computed_token=0 with timing.seconds_per_step={step}"
            raise ValueError(f"{pair}: expected a time above zero in one of them")

    def build(
        self, model: ModelSpec, hardware: HardwareSpec, read_profile: ReadProfile
    ) -> TimingModel:
        step = self.seconds_per_step or 0.0
        return ConstantTiming(self.seconds_per_computed_token, step, self.seconds_per_decode_token)


@dataclass
@TIMINGS.register("calibrated")
class Calibrated(Timing):
    """What the entry calibrate fitted to measured steps of this machine and model."""

    profile: str | None = field(
        None,
        None,
        "file written by the entry calibrate; null: the profile of this model and machine",
    )

    def build(
        self, model: ModelSpec, hardware: HardwareSpec, read_profile: ReadProfile
    ) -> TimingModel:
        return CalibratedTiming(read_profile(self.profile))


# ------------------------------------------------------------------------------
# The devices of an engine.
# ------------------------------------------------------------------------------

#: Numbers of tokens for which vLLM captures CUDA graphs; a step of fewer tokens is padded to the
#: next one.
CAPTURED: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


@dataclass
class Deployment:
    """An engine on `tensor_parallel` · `data_parallel` devices.

    `tensor_parallel`  devices that share each layer; two all-reduces per layer
    `data_parallel`    ranks with requests of their own that share the experts, and so take every
                       step together
    `weights`          model (as its config.json says), fp8 or int4
    `kv`               model, fp8 or int4
    `cuda_graphs`      steps are padded to the numbers of tokens for which graphs were captured
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    weights: str = "model"
    kv: str = "model"
    cuda_graphs: bool = True

    def check(self, path: str, model: ModelSpec) -> None:
        """Raise ValueError for devices or formats that the model does not support."""
        positive(f"{path}.tensor_parallel", self.tensor_parallel)
        positive(f"{path}.data_parallel", self.data_parallel)
        one_of(f"{path}.weights", self.weights, WEIGHTS)
        one_of(f"{path}.kv", self.kv, KV)
        if model.attention_heads % self.tensor_parallel:
            raise ValueError(
                f"{path}.tensor_parallel={self.tensor_parallel}: expected a divisor of the {model.attention_heads} "
                f"attention heads of {model.name}"
            )
        if self.data_parallel > 1 and not model.expert_layers:
            raise ValueError(
                f"{path}.data_parallel={self.data_parallel} with model.name={model.name}: expected 1, for ranks of a "
                "dense model share nothing: they are replicas"
            )
        for key, value, itemsize in (
            ("weights", self.weights, model.weight_itemsize),
            ("kv", self.kv, model.kv_itemsize),
        ):
            if value != "model" and itemsize != 2:
                raise ValueError(
                    f"{path}.{key}={value} with model.{key[:6].rstrip('s')}_itemsize={itemsize}: expected 2"
                )

    @property
    def devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel * self.data_parallel

    def weight_bytes(self, model: ModelSpec) -> int:
        """Return the bytes of weights on one device; the embedding table stays in the model's
        format."""
        scale = WEIGHTS[self.weights][0]
        experts = model.expert_bytes * scale / self.devices
        dense = (model.layer_parameters - model.expert_parameters) * model.weight_itemsize * scale
        tables = (model.head_parameters + model.embedding_parameters) * model.weight_itemsize
        return int(experts + (dense + tables) / self.tensor_parallel)

    def kv_bytes_per_token(self, model: ModelSpec) -> float:
        """Return the bytes of KV per token on one device; KV heads are copied where devices
        outnumber them."""
        return model.kv_bytes_per_token * KV[self.kv] / min(self.tensor_parallel, model.kv_heads)

    def block_tokens(self, model: ModelSpec, usual: int) -> int:
        """Return the tokens of a block: `usual`, or in hybrids a multiple, since a block holds KV
        or states.

        A layer's KV is then no smaller than a layer's state, as vLLM sizes blocks.
        """
        if not model.is_hybrid:
            return usual
        kv = self.kv_bytes_per_token(model) / model.attention_layers
        state = model.state_bytes / model.recurrent_layers / self.tensor_parallel
        return block_tokens(kv, state, usual)

    def padded(self, tokens: int) -> int:
        """Return the tokens that a forward of `tokens` tokens computes."""
        if not self.cuda_graphs or tokens > CAPTURED[-1]:
            return tokens
        return CAPTURED[bisect_left(CAPTURED, tokens)]


# ------------------------------------------------------------------------------
# The profile fitted to a server's log: parameters with intervals, and the deployment that they
# belong to.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The parameters of `FittedTiming`; shares are of the data sheet's peaks and may exceed 1 where
    it is modest.

    `compute`                share of the peak FLOPs per second
    `bandwidth`              share of the peak bytes per second
    `host_s`                 seconds that every step costs whatever it computes
    `host_s_per_sequence`    further seconds per sequence of the step
    `host_s_with_prefill`    further seconds of a step with prompt tokens, which runs outside the
                             graph of decodes
    `experts`                share of `compute` that experts' matrices reach
    `routing`                share of the step's tokens that choose experts independently: routers
                             prefer some experts
    `collective_s`           seconds that a collective takes whatever it moves
    `link_bytes_per_s`       bytes per second between two devices
    """

    compute: float
    bandwidth: float
    host_s: float
    host_s_per_sequence: float = 1e-5
    host_s_with_prefill: float = 2e-3
    experts: float = 0.7
    routing: float = 0.5
    collective_s: float = 2e-5
    link_bytes_per_s: float = 2.5e10

    @classmethod
    def assumed(cls, hardware: HardwareSpec) -> Rates:
        """Return the rates assumed for a device without a log, where a fit starts."""
        return cls(hardware.compute_efficiency, hardware.bandwidth_efficiency, hardware.host_s)


def names_for(model: ModelSpec, deployment: Deployment) -> tuple[str, ...]:
    """Return the names of the parameters that a model with this deployment depends on."""
    always = ("compute", "bandwidth", "host_s", "host_s_per_sequence", "host_s_with_prefill")
    experts = ("experts", "routing") if model.expert_layers else ()
    return (
        always + experts + (("collective_s", "link_bytes_per_s") if deployment.devices > 1 else ())
    )


@dataclass(frozen=True)
class Parameter:
    """One fitted number with its 95 % interval; without identification by the log, it keeps its
    start value."""

    value: float
    low: float
    high: float
    identified: bool


@dataclass(frozen=True)
class FittedProfile:
    """A server's parameters, as fitted to its log.

    `model`, `hardware`  names
    `deployment`         devices and number formats
    `parameters`         by the name of a field of `Rates`
    `unseen`             errors on requests outside the fit: by metric and kind; None without such
                         requests
    `log`, `commit`      source of the fit
    """

    model: str
    hardware: str
    deployment: Deployment
    parameters: dict[str, Parameter]
    unseen: dict[str, dict[str, float | None]]
    log: str
    commit: str

    def rates(self, hardware: HardwareSpec) -> Rates:
        """Return the fitted values; parameters that the deployment does not depend on are as
        assumed."""
        return Rates(
            **asdict(Rates.assumed(hardware))
            | {name: parameter.value for name, parameter in self.parameters.items()}
        )

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )


def read_fitted(path: Path) -> FittedProfile:
    """Read a profile; raises ValueError with one sentence for an invalid file."""
    with reading(f"timing.profile={path}", "a profile as the entry twin writes it"):
        profile = from_json(path.read_bytes(), FittedProfile)
        for name, parameter in profile.parameters.items():
            if name not in Rates.__dataclass_fields__:
                raise ValueError(f"parameters.{name}: no such key")
            positive(f"parameters.{name}", parameter.value)
        return profile


# ------------------------------------------------------------------------------
# The timing model `fitted`: physical counts of a step times a few rates that follow from a
# server's log.
# ------------------------------------------------------------------------------

SHARPNESS = 8  #: of the soft maximum (a^p + b^p)^(1/p): at a = b it is 9 % above both
COLLECTIVES_PER_LAYER = 2


@dataclass
@TIMINGS.register("fitted")
class Fitted(Timing):
    """What the entry twin fitted to a server's log:
    timing.profile=outputs/twin/RUN/profile.json."""

    profile: str = field(REQUIRED, None, "file written by the entry twin")

    def build(
        self, model: ModelSpec, hardware: HardwareSpec, read_profile: ReadProfile
    ) -> TimingModel:
        loaded = read_fitted(Path(self.profile))
        loaded.deployment.check("timing.profile.deployment", model)
        for key, fitted_to, expected in (
            ("model", loaded.model, model.name),
            ("hardware", loaded.hardware, hardware.name),
        ):
            if fitted_to != expected:
                raise ValueError(
                    f"timing.profile={self.profile}: it was fitted to {key} {fitted_to}; expected {key} {expected}"
                )
        return FittedTiming(model, hardware, loaded.deployment, loaded.rates(hardware))


class FittedTiming:
    """Compute, memory, host and collectives at fitted rates; ranks of one engine take a step
    together.

    seconds = max over ranks of own + experts + collectives + host_s (+ host_s_with_prefill with
    prompt tokens)
    own     = soft max(layer FLOPs, layer weights) + soft max(head FLOPs, head weights) if a row of
            logits is due + FLOPs of prefill pairs + bytes of KV and states + host_s_per_sequence ·
            sequences
    experts = soft max(their FLOPs, those that routing · tokens are expected to choose
    independently: RooflineTiming) collectives, two per layer: all-reduces of a rank's tokens
    between `tensor_parallel` devices, each moving
            2 (t − 1) / t of them; a gathering and a scattering of all ranks' tokens between `data_parallel` ranks
    Tokens of a step are padded to captured CUDA graphs before they are multiplied. Reading spans at
    other positions is refused: no log of such a server has been seen.
    """

    __slots__ = (
        "_deployment",
        "_expert_bytes_ns",
        "_expert_ns",
        "_gather_ns",
        "_head_bytes_ns",
        "_head_ns",
        "_host_ns",
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

    def __init__(
        self, model: ModelSpec, hardware: HardwareSpec, deployment: Deployment, rates: Rates
    ) -> None:
        if model.bounded:
            reason = "a fit of layers that read a bounded number of tokens has not been seen"
            raise ValueError(
                f"timing=fitted with model.name={model.name}: expected timing=roofline, for {reason}"
            )
        scale, speed = WEIGHTS[deployment.weights]
        tensor = deployment.tensor_parallel
        ns_per_flop = 1e9 / (hardware.peak_flops * rates.compute * tensor)
        self._ns_per_byte = 1e9 / (hardware.bandwidth_bytes_per_s * rates.bandwidth * tensor)
        self._deployment = deployment
        dense = model.layer_parameters - model.expert_parameters
        active_experts = model.active_layer_parameters - dense
        # nanoseconds of collectives: per token of a rank, per token of all ranks, and per step
        # activations have two bytes
        row = COLLECTIVES_PER_LAYER * model.hidden_size * 2 / rates.link_bytes_per_s * 1e9
        tensor, data = deployment.tensor_parallel, deployment.data_parallel
        reduce_ns = model.num_layers * row * 2 * (tensor - 1) / tensor
        self._gather_ns = model.expert_layers * row * (data - 1) / data
        times = model.num_layers * (tensor > 1) + model.expert_layers * (data > 1)
        latency_ns = COLLECTIVES_PER_LAYER * times * rates.collective_s * 1e9
        self._layer_ns = (
            model.linear_flops_per_token - 2 * active_experts
        ) * ns_per_flop / speed + reduce_ns
        self._layer_bytes_ns = dense * model.weight_itemsize * scale * self._ns_per_byte
        self._head_ns = model.head_flops * ns_per_flop
        self._head_bytes_ns = model.head_parameters * model.weight_itemsize * self._ns_per_byte
        self._pair_ns = model.attention_flops_per_pair * ns_per_flop
        self._kv_ns = model.kv_bytes_per_token * KV[deployment.kv] * self._ns_per_byte
        self._state_ns = 2 * model.state_bytes * self._ns_per_byte
        ranks = deployment.data_parallel
        self._expert_ns = 2 * active_experts * ns_per_flop / (speed * rates.experts * ranks)
        self._expert_bytes_ns = model.expert_bytes * scale * self._ns_per_byte / ranks
        self._unchosen_share = model.unchosen_share**rates.routing
        self._sequence_ns = rates.host_s_per_sequence * 1e9
        self._prefill_ns = rates.host_s_with_prefill * 1e9
        # The half rounds to the nearest nanosecond where int() cuts off.
        self._host_ns = rates.host_s * 1e9 + 0.5
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

    def forward(self, features: StepFeatures) -> float:
        """Return the nanoseconds of the layers alone that all ranks run alike: no logits, no time
        of the host."""
        sequences = features.num_prefills + features.num_decodes
        rows = features.num_decodes + features.num_first_tokens
        host = (
            self._host_ns
            + sequences * self._sequence_ns
            + (self._prefill_ns if features.num_prefills else 0.0)
        )
        logits = self._logits_ns(rows) if rows else 0.0
        return self.exact([features] * self._deployment.data_parallel) - logits - host

    def _logits_ns(self, rows: int) -> float:
        return _soft_max(rows * self._head_ns, self._head_bytes_ns)

    def span_together(self, ranks: Ordered[StepFeatures], k: int) -> Nanoseconds:
        """Return the durations of k such steps: the greatest of the ranks' straight lines."""
        later = np.arange(k)
        # As in `step_together`, one product and the same sums of the same numbers, so that both
        # round the same way.
        lines = [
            (later * rank.num_decodes + rank.decode_context) * self._kv_ns + self._rank_ns(rank)
            for rank in ranks
        ]
        durations: Nanoseconds = (np.maximum.reduce(lines) + self._shared_ns(ranks)).astype(
            np.int64
        )
        return durations

    def _rank_ns(self, features: StepFeatures) -> float:
        """Return the nanoseconds of a rank's separate work, without its decodes' context."""
        f = features
        if f.reads_spans:
            raise ValueError(
                "timing=fitted with an arm that reuses spans: expected timing=roofline or calibrated"
            )
        computed, rows = f.prefill_tokens + f.num_decodes, f.num_decodes + f.num_first_tokens
        nanoseconds = _soft_max(
            self._deployment.padded(computed) * self._layer_ns, self._layer_bytes_ns
        )
        if rows:
            nanoseconds += self._logits_ns(rows)
        nanoseconds += (
            f.prefill_pairs * self._pair_ns + (f.prefill_context + computed) * self._kv_ns
        )
        sequences = f.num_prefills + f.num_decodes
        nanoseconds += (f.loaded_state_bytes + f.captured_state_bytes) * self._ns_per_byte
        return nanoseconds + sequences * (self._state_ns + self._sequence_ns)

    def _shared_ns(self, ranks: Ordered[StepFeatures]) -> float:
        """Return the nanoseconds of the work that all ranks do together or wait for."""
        prefills = sum([rank.num_prefills for rank in ranks])
        shared = self._step_ns + (self._prefill_ns if prefills else 0.0)
        if not self._expert_ns:
            return shared
        tokens = sum(
            [self._deployment.padded(rank.prefill_tokens + rank.num_decodes) for rank in ranks]
        )
        chosen = self._expert_bytes_ns * (1 - self._unchosen_share**tokens)
        return shared + _soft_max(tokens * self._expert_ns, chosen) + tokens * self._gather_ns


def _soft_max(compute_ns: float, memory_ns: float) -> float:
    """Return slightly more than the greater time where both are close: neither hides the other
    completely."""
    greater, less = (compute_ns, memory_ns) if compute_ns > memory_ns else (memory_ns, compute_ns)
    share: float = (1 + (less / greater) ** SHARPNESS) ** (1 / SHARPNESS)
    return greater * share
