"""Count what tensor descriptors (TMA) and warp specialisation would change in the attention kernel's loop.

    python benchmarks/kernels/descriptors.py

Compiles a prefill at head_dim 128 of changed copies of the kernel for sm_90 and sm_100, and prints a Markdown table.
Nothing is run. Only `gather` reads the rows that the kernel reads: `load` takes 64 neighbours, as pages of 64 would.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
HEAD_DIM = 128
LOOP = ("for at in range(tile, end_tile):", "for at in tl.range(tile, end_tile, warp_specialize=True):")
SEEN = "    seen = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)\n"
READ_KEY, READ_VALUE = (
    "_read(from_keys, at_row, of_key, HEAD_DIM, padded)",
    "_read(from_values, at_row, channel, HEAD_DIM, padded)",
)


def _described(rows: str, call: str) -> list[tuple[str, str]]:
    """Keys and values read through descriptors of so many rows."""
    made = "    {0}_rows = tl.make_tensor_descriptor({0}, [1 << 20, row_size], [row_size, 1], [{1}, HEAD_DIM])\n"
    return [
        (SEEN, SEEN + made.format("keys", rows) + made.format("values", rows)),
        (READ_KEY, f"keys_rows.{call}"),
        (READ_VALUE, f"values_rows.{call}"),
    ]


GATHER = _described("1", "gather(key_row, kv_head * HEAD_DIM)")
LOAD = [
    *_described("BLOCK_N", "load([key_row, kv_head * HEAD_DIM])"),
    ("tl.load(of_row + near)", "tl.load(of_row)"),
    ("tl.load(of_row + near, mask=has_tile, other=0)", "tl.load(of_row, mask=has_tile, other=0)"),
    ("        at_row = (key_row.to(tl.int64) * row_size)[:, None]\n", ""),
]
VARIANTS = {
    "as it is": [],
    "gather": GATHER,
    "load": LOAD,
    "specialised": [LOOP],
    "gather, specialised": [*GATHER, LOOP],
    "load, specialised": [*LOAD, LOOP],
}


def changed(folder: Path, changes: list[tuple[str, str]]) -> None:
    """A copy of the kernels in `folder` with some lines replaced; ValueError where one is not there."""
    shutil.copytree(KERNELS / "spanlab_kernels", folder / "spanlab_kernels")
    path = folder / "spanlab_kernels" / "attention" / "kernel.py"
    source = path.read_text(encoding="utf-8")
    for old, new in changes:
        if old not in source:
            raise ValueError(f"{path.name}: expected the line {old.strip()!r}")
        source = source.replace(old, new)
    path.write_text(source, encoding="utf-8")


def count(kernel: str, capability: int) -> None:
    """Compile one kernel and print its counts, or why there are none; in a process of its own."""
    import static

    from spanlab_kernels.ahead import compiled_for
    from spanlab_kernels.attention import triton

    triton.multiplies_registers = lambda device: True
    triton.TURNED_ENTRIES = 1 << 30  # the kernel itself
    with compiled_for(capability) as found:
        static.launch(kernel, static.PHASES["prefill"], HEAD_DIM)
        (compiled,) = [each for each in found if each.name == "attend_tiles"]
        print(json.dumps(static.counted(compiled)))


def counted(changes: list[tuple[str, str]], kernel: str, capability: int) -> str:
    """Instructions of a key tile, or the reason why there is no number."""
    with tempfile.TemporaryDirectory() as folder:
        changed(Path(folder), changes)
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{HERE}", "TRITON_CACHE_DIR": f"{folder}/cache"}
        command = [sys.executable, __file__, "--worker", kernel, str(capability)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode == 0:
        told = json.loads(ended.stdout)
        return f"{told['tile']} ({told['registers']} registers, {told['shared_bytes'] >> 10} KB)"
    if required := re.search(r"requires \.target (\w+)", ended.stderr):
        return f"needs {required[1]}"
    return "no loop to count" if "no loop of the kernel" in ended.stderr else "the compiler fails"


def main() -> None:
    """Compile every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, metavar=("KERNEL", "CAPABILITY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        count(options.worker[0], int(options.worker[1]))
        return
    cells = [(kernel, capability) for capability in (90, 100) for kernel in ("MAT", "QR")]
    print("| reads | " + " | ".join(f"sm_{capability} {kernel}" for kernel, capability in cells) + " |")
    print("|---" * (1 + len(cells)) + "|")
    for name, changes in VARIANTS.items():
        print(f"| {name} | " + " | ".join(counted(changes, *cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
