"""What an engine study runs on: asked in the process that runs it, for a card that is opened here cannot be forked."""

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

OPTIONAL = "flash-linear-attention"
GETTING_IT = f"`uv pip install --python .venvs/engine {OPTIONAL}` brings it"

# Where Linux says what a container may use: version 2, version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class EngineFacts:
    """A device and what runs there; `kind` is cpu or cuda, `device` its real name, `memory_bytes` all that it has.

    `context`  positions that the model was made for
    `threads`  of torch on the CPU
    `rates`    of a large matrix product and a large copy, measured
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
        """One line for tables and figures."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"engine, measured on {self.device}, {self.weights} weights in {self.dtype}, {versions}"


def engine_facts(study: Study) -> EngineFacts:
    """The facts of this process's device; ValueError where the machine has none of that name."""
    import torch

    from spanlab.engine import rates
    from spanlab.engine.load import found_device, read_config

    device, settings = found_device(study.engine.device), study.engine
    threads = settings.threads or torch.get_num_threads()
    torch.set_num_threads(threads)  # rates are those of as many threads as the model has
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name, memory = str(found.name), int(found.total_memory)
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
        versions={name: version(name) for name in (*PACKAGES_OF["engine"], OPTIONAL) if installed(name)},
        threads=threads,
    )


def installed(package: str) -> bool:
    """Whether this environment has a package; nothing is imported."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def host_memory() -> int:
    """Bytes that this machine has, or that this container may use where that is less."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = [path.read_text().strip() for path in _LIMITS if path.exists()]
    return min([there, *(int(limit) for limit in said if limit.isdigit())])


def give_memory_back() -> None:
    """Let the next run have what one that ended early still held: its tensors, and what torch keeps of their memory."""
    gc.collect()
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
