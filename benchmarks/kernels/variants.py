"""Count what the attention kernel would cost with other instructions: none of these variants is used, or was ever run.

    python benchmarks/kernels/variants.py

Each is the kernel's own text with a few lines replaced, compiled for prefill at head_dim 128. `tile` is what all warps
issue for a tile of keys, divided by 8: where warps are specialised, the sum over their loops.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from sass import Loop, Program
from static import PHASES, compiled_kernels, counted, launch, ran, resources

WARPS, HEAD_DIM = 8, 128
SMALL = 25  # instructions: loops of fewer only wait, or search
LOOP = ("in range(tile, end_tile)", "in tl.range(tile, end_tile, warp_specialize=True)")
ANGLES = """    c = tl.load(cos + offset + pair, mask=pair < HALF_BLOCK + ROTARY_HALF, other=1.0)
    s = tl.load(sin + offset + pair, mask=pair < HALF_BLOCK + ROTARY_HALF, other=0.0)
"""
PAIRS = """    c, s = tl.split(tl.load(cos + 2 * offset + 2 * pair[:, None] + tl.arange(0, 2)[None, :]))
"""
PRODUCTS = """    r1 = (first.to(tl.float32) * c[None, :] + second.to(tl.float32) * s[None, :]).to(like)
    r2 = (second.to(tl.float32) * c[None, :] - first.to(tl.float32) * s[None, :]).to(like)
"""
SHEARS = """    x = first.to(tl.float32) + second.to(tl.float32) * c[None, :]
    y = second.to(tl.float32) - x * s[None, :]
    r1, r2 = (x + y * c[None, :]).to(like), y.to(like)
"""
READ = "_load_rows(from_{}, at_row, {}, HEAD_DIM, padded)"
Edits = list[tuple[str, str]]


def described(box: str, read: str) -> Edits:
    """Keys and values by tensor descriptors over the rows of the pool."""
    made = "".join(
        f"    {name} = tl.make_tensor_descriptor({pool}, [1 << 24, row_size], [row_size, 1], {box})\n"
        for name, pool in (("dk", "keys"), ("dv", "values"))
    )
    loop = "    for _ in range(tile, end_tile):\n"
    return [
        (loop, made + loop),
        ("k = " + READ.format("keys", "of_key"), f"k = dk.{read}"),
        ("v = " + READ.format("values", "channel"), f"v = dv.{read}"),
    ]


BOXES = [
    *described("[BLOCK_N, HEAD_DIM]", "load([key_row, kv_head * HEAD_DIM])"),
    ("key_row = tl.load(of_row + near, mask=has_tile, other=0)", "key_row = tl.load(of_tile, mask=has_tile, other=0)"),
    ("next_row = tl.load(of_row + near)", "next_row = tl.load(of_tile + 4)"),
    ("        at_row = (key_row.to(tl.int64) * row_size)[:, None]\n", "        at_row = near[:, None]\n"),
]
GATHER = described("[1, HEAD_DIM]", "gather(key_row, kv_head * HEAD_DIM)")
VARIANTS: dict[str, Edits] = {
    "as it is": [],
    "boxes": BOXES,
    "gather": GATHER,
    "specialised": [LOOP],
    "boxes, specialised": [*BOXES, LOOP],
    "gather, specialised": [*GATHER, LOOP],
    "sine and cosine side by side": [(ANGLES, PAIRS)],
    "three shears": [(PRODUCTS, SHEARS)],
    "three shears, side by side": [(ANGLES, PAIRS), (PRODUCTS, SHEARS)],
}


def measure(name: str, capability: int, kernel: str) -> str:
    """One line of the table; in a process of its own, since some variants end the compiler's."""
    from spanlab_kernels.attention import triton

    with tempfile.TemporaryDirectory() as folder, compiled_kernels(capability) as found:
        triton.attend_tiles = changed(VARIANTS[name], Path(folder))
        launch(kernel, PHASES["prefill"], HEAD_DIM)
        (compiled,) = [each for each in found if each.name == "attend_tiles"]
        file = Path(folder, "cubin")
        file.write_bytes(compiled.kernel.asm["cubin"])
        program, text = Program(ran("nvdisasm", "-c", str(file))), compiled.kernel.asm["ttgir"]
        if "ttg.warp_specialize" in text.replace("ttg.warp_specialize.tag", ""):
            row = {"tile": specialised(program, text), "span": "", "mask": ""} | resources(str(file))
        else:
            row = counted(compiled)
    return " | ".join(str(row[key]) for key in ("registers", "stack_bytes", "tile", "mask", "span"))


def changed(edits: Edits, folder: Path) -> Any:
    """The kernel after these replacements."""
    (folder / "variant.py").write_text(edited(edits))
    specification = importlib.util.spec_from_file_location("variant", folder / "variant.py")
    assert specification is not None and specification.loader is not None
    specification.loader.exec_module(module := importlib.util.module_from_spec(specification))
    return module.attend_tiles


def edited(edits: Edits) -> str:
    """The kernel's text after these replacements; ValueError where one does not find its text once."""
    text = (HERE.parents[1] / "kernels/spanlab_kernels/attention/kernel.py").read_text()
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"kernel.py: expected {old!r} once, not {text.count(old)} times.")
        text = text.replace(old, new)
    return text


def specialised(program: Program, text: str) -> int:
    """Instructions of all loops over tiles, by as many warps as each has: `text` has the parts and their warps."""
    parts = re.split(r"\n\s+partition\d+\(", text)[1:]
    warps = {role(part, "tc_gen5_mma", "async_"): int(re.findall(r"num_warps\((\d+)\)", part)[0]) for part in parts}
    loops = [loop for loop in program.loops if sum(len(program.code[node]) for node in loop.nodes) >= SMALL]
    inner = [loop for loop in loops if not any(other.nodes < loop.nodes for other in loops)]
    issued = 0
    for loop in inner:
        opcodes = " ".join(opcode for node in loop.nodes for opcode in program.code[node])
        if opcodes.count("MUFU.EX2") > 1:
            issued += plain(program, loop) * WARPS
        elif re.search("MMA|UTMALDG|TTM|LDTM", opcodes):
            issued += plain(program, loop) * warps[role(opcodes, "MMA", "UTMALDG|LDGSTS")]
    return round(issued / WARPS)


def role(text: str, product: str, read: str) -> str:
    """What a part of the warps does."""
    return "products" if re.search(product, text) else "reads" if re.search(read, text) else "sums"


def plain(program: Program, loop: Loop) -> int:
    """Instructions of a tile that needs no mask."""
    return program.lengths(loop)[0]


def main() -> None:
    """Compile, count, print."""
    if len(sys.argv) > 1:
        print(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
        return
    for edits in VARIANTS.values():
        edited(edits)  # a text that is not found is no failure of the compiler
    print("| variant | target | kernel | registers | stack, B | tile | mask | span |\n" + "|---" * 8 + "|")
    for name in VARIANTS:
        for capability in (90, 100):
            for kernel in ("MAT", "QR"):
                if kernel == "MAT" and VARIANTS[name] and VARIANTS[name][0][0] in (ANGLES, PRODUCTS):
                    continue
                command = [sys.executable, __file__, name, str(capability), kernel]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                line = "does not compile | | | |" if done.returncode else done.stdout.strip().splitlines()[-1]
                print(f"| {name} | sm_{capability} | {kernel} | {line} |", flush=True)


if __name__ == "__main__":
    main()
