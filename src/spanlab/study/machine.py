"""What a study measures of its machine: noise, load, device and the floor of a step."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson

from spanlab.build import EngineParts, build_engine, build_policy
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.model_spec import DeviceRates, ModelSpec
from spanlab.provenance import PACKAGES_OF, machine
from spanlab.records import delays_of
from spanlab.report.data import StudyData
from spanlab.settings.arms import Strategy
from spanlab.settings.study import Study
from spanlab.study.jobs import Row, repeated_arm, run_cells
from spanlab.study.numbers import ArmFiles, Columns, select

# ------------------------------------------------------------------------------
# Noise of a machine that runs an engine study: readings, limits, and the texts for a report.
#
# Every measure grows with the noise, so that a noisier machine does not pass more easily.
# ------------------------------------------------------------------------------

AA_LIMIT = 0.10  # of the spread of A/A ratios
DRIFT_LIMIT = 0.10  # of the fixed step's time
STEAL_LIMIT = 0.05  # of all processor time


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine's state before a run.

    `step_ns`  time of the fixed step
    `load`     load average of the last minute
    `ticks`    processor time since boot; `stolen` is the time of it that other virtual machines
               used
    """

    step_ns: int
    load: float
    ticks: int
    stolen: int


@dataclass(frozen=True)
class Noise:
    """Measured noise of a study's machine; None where a measure has no data.

    `aa`          mean TTFT of the repeated baseline ÷ that of the baseline, by repeat
    `drift`       95th percentile of the fixed step's relative distance from its median
    `load`        mean load average, to compare with `cores`
    `steal`       share of processor time that other virtual machines used
    `alternates`  arms took turns request by request, so that drift affects their ratios as it
                  affects the A/A ratios
    """

    aa: tuple[float, ...]
    drift: float | None
    load: float | None
    steal: float | None
    cores: int
    alternates: bool = False

    @staticmethod
    def of(
        aa: Sequence[float], readings: Sequence[Reading], cores: int, alternates: bool = False
    ) -> Noise:
        """Compute the noise of a study from its A/A ratios and readings."""
        return Noise(
            aa=tuple(aa),
            drift=drift([reading.step_ns for reading in readings]),
            load=float(np.mean([reading.load for reading in readings])) if readings else None,
            steal=steal(readings),
            cores=cores,
            alternates=alternates and bool(aa),
        )

    @property
    def spread(self) -> float | None:
        """Root mean square of the A/A ratios' logarithms, as a relative difference; None without a
        ratio."""
        if not self.aa:
            return None
        return math.expm1(math.sqrt(float(np.mean(np.log(self.aa) ** 2))))

    def reasons(self) -> list[str]:
        """Describe every exceeded limit."""
        reasons = []
        if self.spread is not None and self.spread > AA_LIMIT:
            ratios = (
                f"{min(self.aa):.3g} to {max(self.aa):.3g}"
                if len(self.aa) > 1
                else f"{self.aa[0]:.3g}"
            )
            reasons.append(
                f"A/A of the baseline {ratios}, spread {self.spread:.0%} (limit {AA_LIMIT:.0%})"
            )
        if self.drift is not None and self.drift > DRIFT_LIMIT and not self.alternates:
            reasons.append(f"a fixed step drifted by {self.drift:.0%} (limit {DRIFT_LIMIT:.0%})")
        if self.load is not None and self.load > self.cores:
            reasons.append(f"load average {self.load:.1f} (limit {self.cores} cores)")
        if self.steal is not None and self.steal > STEAL_LIMIT:
            reasons.append(f"stolen processor time {self.steal:.0%} (limit {STEAL_LIMIT:.0%})")
        return reasons

    @property
    def description(self) -> str:
        """Text with all measures, within their limits or not."""
        parts = [f"A/A ratios {', '.join(f'{ratio:.3g}' for ratio in self.aa)}"] if self.aa else []
        for name, value in (
            ("spread", self.spread),
            ("step drift", self.drift),
            ("stolen time", self.steal),
        ):
            parts += [f"{name} {value:.1%}"] if value is not None else []
        parts += (
            [f"load average {self.load:.1f} on {self.cores} cores"] if self.load is not None else []
        )
        return f"noise: {'; '.join(parts) or 'not measured'}"

    def sentence(self, refused: str) -> str:
        """Sentence why a study reports no `refused`, such as speedups; empty on a calm machine."""
        reasons = self.reasons()
        return f"noisy machine, no {refused}: {'; '.join(reasons)}" if reasons else ""

    def summary(self) -> dict[str, Any]:
        """`machine_noise` of a summary."""
        return {
            "aa_ratios": list(self.aa),
            "aa_spread": self.spread,
            "step_drift": self.drift,
            "load_average": self.load,
            "steal": self.steal,
            "cores": self.cores,
            "noisy": bool(self.reasons()),
            "limits": {"aa_spread": AA_LIMIT, "step_drift": DRIFT_LIMIT, "load_average": self.cores}
            | {"steal": STEAL_LIMIT},
        }


def drift(steps_ns: Sequence[int]) -> float | None:
    """95th percentile of |step ÷ median − 1|; None for fewer than two steps."""
    if len(steps_ns) < 2:
        return None
    steps = np.asarray(steps_ns, np.float64)
    return float(np.percentile(np.abs(steps / np.median(steps) - 1), 95))


def steal(readings: Sequence[Reading]) -> float | None:
    """Stolen share of the processor time between the first and the last reading; None without
    elapsed time."""
    if len(readings) < 2 or readings[-1].ticks == readings[0].ticks:
        return None
    return (readings[-1].stolen - readings[0].stolen) / (readings[-1].ticks - readings[0].ticks)


def successive(values: Sequence[float]) -> list[float]:
    """A/A ratios of each repeat to the previous one."""
    return ratios(values[:-1], values[1:])


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """A/A ratios of two runs of one arm by repeat; a repeat that only one run has is ignored."""
    pairs = zip(first, second, strict=False)
    return [after / before for before, after in pairs if before > 0 and after > 0]


# ------------------------------------------------------------------------------
# Readings of the machine between the runs of an engine study, stored as JSON lines.
# ------------------------------------------------------------------------------

_STAT = Path("/proc/stat")
_STOLEN = 7  # the column of stolen time, of user, nice, system, idle, iowait, irq, softirq, steal
_COUNTED = 8  # later columns are included in user and nice


def cores() -> int:
    """Number of processors of the machine, as for the load average; this process may be pinned to
    fewer."""
    return os.cpu_count() or 1


def processor_time(stat: str) -> tuple[int, int]:
    """Parse /proc/stat: ticks of all processors, and stolen ticks."""
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1 : 1 + _COUNTED]]
    return sum(ticks), ticks[_STOLEN] if len(ticks) > _STOLEN else 0


def record_reading(path: Path, step_ns: Callable[[], int]) -> None:
    """Append one reading to `path`; `step_ns` measures the fixed step."""
    total, stolen = processor_time(_STAT.read_text()) if _STAT.exists() else (0, 0)
    reading = Reading(step_ns(), os.getloadavg()[0], total, stolen)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(orjson.dumps(asdict(reading), option=orjson.OPT_APPEND_NEWLINE))


def read_readings(path: Path) -> list[Reading]:
    """Read the readings of a study in order, without a partial line of a killed process."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [Reading(**orjson.loads(line)) for line in lines]


# ------------------------------------------------------------------------------
# Device of an engine study, read in the process that runs it: after a fork, an open CUDA device
# is unusable.
# ------------------------------------------------------------------------------

OPTIONAL_PACKAGE = "flash-linear-attention"
WITHOUT_OPTIONAL = (
    f"{OPTIONAL_PACKAGE} is not installed: recurrent layers use the slower code of transformers; "
    f"install it with `uv pip install --python .venvs/engine {OPTIONAL_PACKAGE}`"
)

# Memory limit of a container: cgroup version 2, version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class EngineFacts:
    """Device and model of an engine study; `kind` is cpu or cuda, `memory_bytes` the device's total
    memory.

    `device`   real name of the device
    `context`  maximum number of positions of the model
    `threads`  CPU threads of torch
    `rates`    measured rates of a large matrix product and a large copy
    """

    kind: str
    device: str
    memory_bytes: int
    model: str
    weights: str
    dtype: str
    context: int
    versions: dict[str, str]
    threads: int
    rates: DeviceRates

    def line(self) -> str:
        """One line of provenance for tables and figures."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"engine, measured on {self.device}, {self.weights} weights in {self.dtype}, {versions}"
        )


def engine_facts(study: Study) -> EngineFacts:
    """Read the facts of this process's device; ValueError where the machine has no such device."""
    import torch

    from spanlab.engine.load import measure, read_config, resolve_device

    device, settings = resolve_device(study.engine.device), study.engine
    threads = settings.threads or torch.get_num_threads()
    torch.set_num_threads(threads)  # measure rates with the model's number of threads
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = str(properties.name), int(properties.total_memory)
    else:
        name = f"{machine()}, {threads} thread" + ("s" if threads > 1 else "")
        memory = host_memory()
    return EngineFacts(
        kind=device.type,
        device=name,
        memory_bytes=memory,
        rates=measure(getattr(torch, dtype_of(study.model)), device),
        model=settings.path or settings.name or study.model.name,
        weights="random" if settings.weights == "random" else "pretrained",
        dtype=dtype_of(study.model),
        context=read_config(settings, settings.name or study.model.name).max_position_embeddings,
        versions={
            name: version(name)
            for name in (*PACKAGES_OF["engine"], OPTIONAL_PACKAGE)
            if installed(name)
        },
        threads=threads,
    )


def installed(package: str) -> bool:
    """Whether a package is installed; this imports nothing."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def host_memory() -> int:
    """Memory of this machine in bytes, or the container's limit where that is less."""
    installed_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _LIMITS if path.exists()]
    return min([installed_bytes, *(int(limit) for limit in limits if limit.isdigit())])


def release_memory() -> None:
    """Free the tensors of finished or failed runs, and torch's cached CUDA memory."""
    gc.collect()
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------
# A step of fixed shape on the engine; changes of its duration over a study measure the
# machine's drift.
# ------------------------------------------------------------------------------

TOKENS = 256  # of the prompt, fewer where the model's context is shorter
REPEATS = 5


class FixedStep:
    """One prefill of a constant prompt, on an engine that stores no prefix."""

    def __init__(self, spec: ModelSpec, engine: EngineSettings, model: Any) -> None:
        tokens = np.random.default_rng(0).integers(
            0, model.vocab_size, min(TOKENS, model.context - 1)
        )
        self._request = Request(0, 0, (Span(tokens.astype(np.int32)),), output_len=1)
        self._rules = BatchRules(max_num_batched_tokens=TOKENS, max_num_seqs=1)
        config = EngineParts(spec, engine, self._rules)
        strategy = Strategy(family="none", keep=False)
        policy = build_policy(config, strategy, 0, TOKENS)
        assert isinstance(policy, TreePolicy), "an arm that stores nothing uses the policy `tree`"
        self._engine = build_engine(config, strategy, model, policy, [self._request])
        self._serve()

    def measure(self) -> int:
        """Median duration in nanoseconds over a few steps in a row."""
        return int(median([self._serve() for _ in range(REPEATS)]))

    def _serve(self) -> int:
        from spanlab_sim.run import serve

        row = serve(
            [self._request], self._engine.policy, self._rules, self._engine, lambda record: None
        )
        return round(row.busy_s * 1e9)


# ------------------------------------------------------------------------------
# A/A runs: the same arm on the same arrivals, as a measure of the machine's noise.
# ------------------------------------------------------------------------------

READINGS = "readings.jsonl"  # file of a study's machine readings, in the order of its runs


def repeat_files(folder: Path, arm: str) -> ArmFiles:
    """Files of the repeated baseline, in a folder by arm, because a resumed study may repeat
    another arm."""
    return ArmFiles.alone(folder / "repeat" / arm, folder / READINGS, folder / "steps")


def floor_files(folder: Path, arm: str) -> ArmFiles:
    """Files of the baseline with other prefill chunks, which measures its numerical noise."""
    return ArmFiles.alone(folder / "floor" / arm, folder / READINGS, folder / "steps")


def noise_of(study: Study, baseline: ArmFiles, repeat: ArmFiles | None, readings: Path) -> Noise:
    """Noise of a finished study, from A/A ratios by seed (or between repeats at each load) and all
    readings."""
    if repeat is None:
        # A/A ratios of each repeat to the previous one, at each load
        ttfts: dict[float | None, dict[int, list[float]]] = {}
        for cell, columns in baseline.columns().items():
            ttfts.setdefault(cell.rate_rps, {}).setdefault(cell.repeat, []).append(
                _mean_ttft(columns)
            )
        loads = [
            [float(np.mean(repeats[repeat])) for repeat in sorted(repeats)]
            for repeats in ttfts.values()
        ]
        aa_ratios = [ratio for repeats in loads for ratio in successive(repeats)]
    else:
        aa_ratios = ratios(mean_ttfts(study, baseline), mean_ttfts(study, repeat))
    return Noise.of(aa_ratios, read_readings(readings), cores(), study.engine.alternate)


def mean_ttfts(study: Study, files: ArmFiles) -> list[float]:
    """Mean TTFT in seconds of each finished seed at the study's load, in the order of
    `study.seeds`."""
    rate = study.arrivals.rate_rps
    by_seed = {
        cell.seed: columns for cell, columns in files.columns().items() if cell.rate_rps == rate
    }
    return [_mean_ttft(by_seed[seed]) for seed in study.runs.seeds if seed in by_seed]


def _mean_ttft(columns: Columns) -> float:
    counted = select(columns, columns["counted"].astype(bool))
    return float(np.mean(delays_of(counted)["ttft_s"]))


def withdraw_speedups(data: StudyData, noise: Noise) -> StudyData:
    """Add the noise as a note; above a limit, also remove the speedups and add a caveat with the
    reason."""
    data = replace(data, notes=(*data.notes, noise.description))
    sentence = noise.sentence("speedups")
    if not sentence:
        return data
    for arm in data.arms:
        arm.summary["speedup"] = None
    return replace(data, caveats=(*data.caveats, sentence), footer=f"{data.footer} · {sentence}")


# ------------------------------------------------------------------------------
# The floor: the baseline repeated with other prefill chunks, which measures the numerical noise
# of its scores.
# ------------------------------------------------------------------------------

NAME = "floor"  # name of the row in lists of arms


def floor_row(study: Study, folder: Path) -> Row:
    """Row of the floor, for studies whose analyses read it."""
    arm, max_tokens = study.runs.baseline, study.analyses.methods.floor_tokens
    rules = replace(study.batch, max_num_batched_tokens=max_tokens, enable_chunked_prefill=True)
    return Row(NAME, arm, floor_files(folder, arm), tuple(run_cells(study, arm)), rules=rules)


# ------------------------------------------------------------------------------
# Plain transformers: the requests of the baseline once more, without our engine and without a
# cache, in turns with the arms.
# ------------------------------------------------------------------------------

PLAIN_NAME = "plain transformers"  # of the row in lists of arms


def plain_row(study: Study, folder: Path) -> Row:
    """Row of plain transformers, for studies of the engine whose analyses read it."""
    arm = repeated_arm(study)
    files = ArmFiles.alone(folder / "plain", folder / READINGS, folder / "steps")
    return Row(PLAIN_NAME, arm, files, tuple(run_cells(study, arm)), plain=True)
