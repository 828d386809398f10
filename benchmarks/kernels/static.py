"""Count what the attention kernels cost, from their compiled code: no device is needed, and no time is measured.

    python benchmarks/kernels/static.py [--dims 64 128 256] [--out FOLDER]

Compiles each variant for sm_80, sm_90 and sm_100, and writes static.json and static.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import costs
from sass import Program

CAPABILITIES = (80, 90, 100)
KERNELS = ("plain", "MAT", "QR", "KR")
PHASES = {"prefill": 1000, "decode": 1}
"""Query rows of a group."""
HEADS, KV_HEADS, PAGE, KEYS = 32, 8, 16, 4096


def launch(kernel: str, rows: int, head_dim: int) -> None:
    """Launch a variant on tensors that only have a shape."""
    import plain
    import torch

    from spanlab_kernels.attention.batch import Group, Scores, Span, span_batch
    from spanlab_kernels.attention.kernel import blocks
    from spanlab_kernels.attention.triton import attend
    from spanlab_kernels.blocks import angle_table
    from spanlab_kernels.testing import inverse_powers

    pages = torch.empty(KEYS // PAGE, PAGE, KV_HEADS, head_dim, dtype=torch.bfloat16)
    query = torch.empty(rows, HEADS, head_dim, dtype=torch.bfloat16)
    if kernel == "plain":
        size = blocks(head_dim, query.dtype, rows * HEADS // KV_HEADS)
        table = torch.arange(KEYS // PAGE, dtype=torch.int32)[None]
        options = {"block_m": size.m, "block_n": size.n, "warps": size.warps, "stages": size.stages}
        plain.attend(query[None], pages, pages, table, torch.tensor([KEYS], dtype=torch.int32), 0.1, **options)
        return
    batch = span_batch([Group(range(KEYS - rows, KEYS), [Span(0, KEYS, 0, range(len(pages)))])], page_size=PAGE)
    table = angle_table(inverse_powers(head_dim), KEYS + 1)
    attend(query, pages, pages, batch, Scores(kernel, table, 0.1, interleaved=False))


@contextmanager
def compiled_kernels(capability: int) -> Iterator[Any]:
    """Kernels that are launched within, compiled for a compute capability."""
    from spanlab_kernels.attention import triton
    from spanlab_kernels.testing import compiled_for

    triton.multiplies_registers = lambda device: capability >= 90
    triton.shares_rows = lambda device: capability == 100
    triton.ROTATE_ONCE_ENTRIES = 1 << 30  # the kernel itself
    with compiled_for(capability) as found:
        yield found


def measure(capability: int, dims: list[int]) -> list[dict[str, Any]]:
    """All variants for one compute capability; in a process of its own."""
    rows = []
    with compiled_kernels(capability) as found:
        for head_dim in dims:
            for phase, count in PHASES.items():
                for kernel in KERNELS:
                    found.clear()
                    launch(kernel, count, head_dim)
                    (compiled,) = [each for each in found if each.name in ("attend_tiles", "attend_pages")]
                    variant = {"kernel": kernel, "phase": phase, "head_dim": head_dim, "capability": capability}
                    rows.append(variant | counted(compiled))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def counted(compiled: Any) -> dict[str, Any]:
    """Resources and instructions of one compiled kernel."""
    options, warps = compiled.options, compiled.options["num_warps"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.kernel.asm["cubin"])
        file.flush()
        used = resources(file.name)
        counts = Program(ran("nvdisasm", "-c", file.name)).counts()
    return {
        "block_m": options["BLOCK_M"], "block_n": options["BLOCK_N"], "warps": warps, "stages": options["num_stages"],
        **used, "shared_bytes": compiled.shared, **vars(counts),
    }  # fmt: skip


def resources(file: str) -> dict[str, int]:
    """Registers and stack of a compiled kernel."""
    text = ran("cuobjdump", "--dump-resource-usage", file)
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", text))) for name in ("REG", "STACK"))
    return {"registers": registers, "stack_bytes": stack}


def ran(tool: str, *arguments: str) -> str:
    """What one of the tools that come with Triton prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def measured_apart(capability: int, dims: list[int]) -> list[dict[str, Any]]:
    """`measure` in a process of its own, since Triton keeps the device that it was told of."""
    command = [sys.executable, __file__, "--worker", str(capability), "--dims", *map(str, dims)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Compile, count, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker, options.dims)))
        return
    with ThreadPoolExecutor(options.processes) as pool:
        parts = list(pool.map(lambda capability: measured_apart(capability, options.dims), CAPABILITIES))
    rows = costs.with_costs([row for part in parts for row in part])
    versions = {name: version(name) for name in ("torch", "triton")}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "static.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    (options.out / "static.md").write_text(costs.page(rows, versions), encoding="utf-8")


if __name__ == "__main__":
    main()
