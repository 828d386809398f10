"""Describe a device: what it is, what is installed, and with --rates what it does at best.

    python benchmarks/cards/describe.py --device cuda --out FILE [--rates]

Writes FILE, JSON, and prints it. Rates are those of a large matrix product and of a large copy, measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spanlab.engine.load import measure
from spanlab.provenance import commit, machine
from spanlab.study.machine import host_memory, installed

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flashinfer-python", "flash-linear-attention")
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}


def environment(device: torch.device) -> dict[str, Any]:
    """The device, the machine around it, and the versions of what runs on it."""
    from importlib.metadata import version

    facts: dict[str, Any] = {"commit": commit(), "machine": machine(), "host_memory_bytes": host_memory()}
    facts["versions"] = {name: version(name) if installed(name) else None for name in PACKAGES}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {"device": found.name, "memory_bytes": found.total_memory, "cuda": torch.version.cuda}
        facts |= {"capability": [found.major, found.minor], "multiprocessors": found.multi_processor_count}
        facts["driver"] = _driver()
    return facts


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def best(device: torch.device) -> dict[str, Any]:
    """FLOPs and bytes per second by type of numbers."""
    return {str(dtype).removeprefix("torch."): asdict(measure(dtype, device)) for dtype in DTYPES[device.type]}


def main() -> None:
    """Write and print what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    text = json.dumps(best(device) if given.rates else environment(device), indent=2)
    given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
