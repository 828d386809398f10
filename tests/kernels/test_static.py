"""Counting instructions of machine code, costs that follow from the counts, and the plain kernel for comparison."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from spanlab_kernels.testing import random_tensor

from .attention_layouts import SCALE

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"


def load(name):
    """Load a module of the benchmarks, which are not a package."""
    specification = importlib.util.spec_from_file_location(f"benchmarks_kernels_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def code(*items):
    """Machine code as nvdisasm prints it; a number stands for as many additions."""
    lines = []
    for item in items:
        lines += ["IADD3 R1, R1, R2, RZ ;"] * item if isinstance(item, int) else [item]
    return "\n".join(
        line if line.startswith(".L") else f"        /*{16 * index:04x}*/  {line}" for index, line in enumerate(lines)
    )


TILE = ("HGMMA.64x64x16 R24, gdesc[UR4], R24 ;", 60)
FLAT = code(
    5, ".L_x_1:", *TILE, "@P0 BRA `(.L_x_2) ;", 30, ".L_x_2:", 3, "@P1 BRA `(.L_x_3) ;", "LDG.E R2, desc[UR4][R2.64] ;",
    70, ".L_x_3:", "STL [R1], R2 ;", "@!P2 BRA `(.L_x_4) ;", 4, ".L_x_4:", "@P3 BRA `(.L_x_1) ;", 7, "EXIT ;",
)  # fmt: skip
NESTED = code(
    ".L_x_1:", 50, ".L_x_2:", *TILE, "@P0 BRA `(.L_x_2) ;", 5, ".L_x_3:", *TILE, 20, "@P0 CALL.REL.NOINC `(.L_x_4) ;",
    "BRA `(.L_x_3) ;", ".L_x_4:", "@P1 BRA `(.L_x_1) ;", "EXIT ;",
)  # fmt: skip


def test_parts_of_a_flat_loop_are_told_apart():
    # 61 and 8 on every path, and 4 after a short branch; a long branch that loads is a span's, another a mask's
    assert vars(load("sass").Program(FLAT).counts()) == {
        "tile": 61 + 1 + 3 + 1 + 1 + 1 + 4 + 1, "mask": 30, "span": 71, "spills": 1, "restarts": 0,
    }  # fmt: skip


def test_a_loop_for_each_span_restarts():
    counts = load("sass").Program(NESTED).counts()
    assert (counts.tile, counts.mask, counts.span, counts.restarts) == (62, 21, 50 + 5 + 1, 1)


def test_a_loop_reached_by_a_table_of_jumps_is_counted():
    table = 'BRX R2 -0x180 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*) ;'
    counts = load("sass").Program(code(table, ".L_x_1:", 9, "EXIT ;", ".L_x_2:", *TILE, "@P0 BRA `(.L_x_2) ;")).counts()
    assert (counts.tile, counts.restarts) == (62, 0)


def test_variants_find_what_they_replace():
    variants = load("variants")
    texts = {variants.edited(edits) for edits in variants.VARIANTS.values()}
    assert len(texts) == len(variants.VARIANTS)


def test_code_without_products_is_refused():
    with pytest.raises(ValueError, match=r"^no loop of the kernel multiplies matrices\.$"):
        load("sass").Program(code(".L_x_1:", 9, "@P0 BRA `(.L_x_1) ;")).counts()


ROW = {
    "capability": 90, "phase": "prefill", "head_dim": 128, "kernel": "plain", "block_m": 128, "block_n": 64, "warps": 8,
    "registers": 255, "shared_bytes": 131072, "tile": 400, "mask": 50, "span": 0, "restarts": 0,
}  # fmt: skip


def test_costs_follow_from_counts():
    costs = load("costs")
    plain, spans = costs.with_costs([ROW, ROW | {"kernel": "QR", "span": 100}])
    assert plain["programs"] == 1 and plain["issue_cycles"] == 800 and plain["matrix_cycles"] == 1024
    assert spans["span_cost_keys"] == 16.0
    # 500 keys are 8 tiles, one of them masked; 128 keys are 2 full ones
    assert spans["over_plain"]["500"] == round((8 * 400 + 50 + 100) / (400 * 500 / 64) - 1, 3)
    assert spans["over_plain"]["128"] == round(900 / 800 - 1, 3)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "programs"), [(255, 8, 1, 1), (128, 4, 1, 4), (64, 4, 71680, 3)]
)
def test_programs_are_limited_by_registers_and_memory(registers, warps, shared, programs):
    costs = load("costs")
    row = ROW | {"registers": registers, "warps": warps, "shared_bytes": shared}
    assert costs.programs(row, costs.CARDS[90]) == programs


@pytest.mark.parametrize("rows", [1, 40])
def test_plain_kernel_is_causal_attention(rows):
    lengths, pages = [70, 41], torch.randperm(12)
    query, keys, values = random_tensor(2, rows, 4, 24), *(random_tensor(12, 16, 2, 24, seed=seed) for seed in (1, 2))
    table = torch.stack([pages[:6], pages[6:]]).int()
    options = {"block_m": 16, "block_n": 32, "warps": 4, "stages": 2}
    outputs = load("plain").attend(
        query, keys, values, table, torch.tensor(lengths, dtype=torch.int32), SCALE, **options
    )
    for length, q, page_ids, out in zip(lengths, query, table, outputs, strict=True):
        k, v = (x[page_ids.long()].flatten(0, 1)[:length].repeat_interleave(2, 1) for x in (keys, values))
        unseen = torch.ones(rows, length, dtype=torch.bool).triu(length - rows + 1)
        scores = (SCALE * torch.einsum("rhd,khd->hrk", q, k)).masked_fill(unseen, -torch.inf)
        torch.testing.assert_close(out, torch.einsum("hrk,khd->rhd", scores.softmax(-1), v), atol=1e-5, rtol=1e-5)
