"""Device of an engine study, read in the process that runs it: after a fork, an open CUDA device is unusable."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spanlab.device_rates import DeviceRates
from spanlab.engine.settings import dtype_of
from spanlab.settings import Study
from spanlab.study.output.provenance import PACKAGES_OF, machine

OPTIONAL_PACKAGE = "flash-linear-attention"
WITHOUT_OPTIONAL = (
    f"{OPTIONAL_PACKAGE} is not installed: recurrent layers use the slower code of transformers; "
    f"install it with `uv pip install --python .venvs/engine {OPTIONAL_PACKAGE}`"
)

# Memory limit of a container: cgroup version 2, version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class EngineFacts:
    """Device and model of an engine study; `kind` is cpu or cuda, `memory_bytes` the device's total memory.

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
        return f"engine, measured on {self.device}, {self.weights} weights in {self.dtype}, {versions}"


def engine_facts(study: Study) -> EngineFacts:
    """Read the facts of this process's device; ValueError where the machine has no such device."""
    import torch

    from spanlab.engine import rates
    from spanlab.engine.load import read_config, resolve_device

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
        rates=rates.measure(getattr(torch, dtype_of(study.model)), device),
        model=settings.path or settings.name or study.model.name,
        weights="random" if settings.weights == "random" else "pretrained",
        dtype=dtype_of(study.model),
        context=read_config(settings, settings.name or study.model.name).max_position_embeddings,
        versions={name: version(name) for name in (*PACKAGES_OF["engine"], OPTIONAL_PACKAGE) if installed(name)},
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
