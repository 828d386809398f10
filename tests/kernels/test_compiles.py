"""The kernels compile for other devices, attention at every head_dim that the engine supports."""

from itertools import chain

import pytest

from spanlab_kernels.attention.batch import FORMS

CALLS = """
import torch
from triton.runtime.driver import driver
from spanlab_kernels.blocks import angle_table
from spanlab_kernels.attention import Group, Scores, Span, span_batch, triton
from spanlab_kernels.testing import inverse_powers
triton.target_programs = lambda device: 264
group = Group(range(4096 - {rows}, 4096), [Span(0, 4096, 0, range(256))], [1] * {rows} if {shifted} else None)
pages = torch.empty(256, 16, {kv_heads}, {head_dim}, dtype=torch.{dtype})
query = torch.empty({rows}, {heads}, {head_dim}, dtype=torch.{dtype})
triton.ROTATE_ONCE_ENTRIES = {rotate_once}
triton.multiplies_registers = lambda device: driver.active.get_current_target().arch >= 90
triton.shares_rows = lambda device: driver.active.get_current_target().arch == 100
triton.attend(
    query, pages, pages, span_batch([group], page_size=16),
    Scores("{form}", angle_table(inverse_powers({rotary_dim}), 4097), 0.1, {interleaved}),
)
"""
DEFAULTS = {"rows": 12, "form": "QR", "head_dim": 128, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
DEFAULTS |= {"shifted": False, "interleaved": False, "rotate_once": 10**9}
CAPABILITIES = (80, 90, 100)


def calls(*launches):
    """The program of `compile_for`; `rotary_dim` defaults to head_dim."""
    launch_options = [DEFAULTS | launch for launch in launches]
    return "\n".join(CALLS.format(**{"rotary_dim": launch["head_dim"]} | launch) for launch in launch_options)


OTHERS = """
from spanlab_kernels import chunk_kernels, row_kernels
from spanlab_kernels.testing import BLOCK_CASES, ROPE_CASES
for case, dtype in zip(ROPE_CASES[2:6], (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)):
    x = torch.zeros(case.tokens, case.heads, case.head_dim, dtype=dtype)
    table = angle_table(inverse_powers(case.rotary_dim), 4097)
    row_kernels.rotate(x, case.shifts(), table, interleaved=case.interleaved, out=torch.empty_like(x))
for case, dtype in zip(BLOCK_CASES[1:3], (torch.float32, torch.bfloat16)):
    pages = torch.zeros(case.num_pages, case.page_size, case.heads, case.head_dim, dtype=dtype)
    source, target = case.two_sets()
    out = torch.zeros(case.slots, case.heads, case.head_dim, dtype=dtype)
    row_kernels.gather(pages, source, out)
    row_kernels.scatter(pages, source.int(), out)
    row_kernels.copy(pages, source, target)
    row_kernels.write(pages, pages, source, out, out)
for width, key_dim, further in ((32, 128, 128), (8, 128, 0), (1, 128, 0), (32, 24, 0)):
    sizes = (width, key_dim), (width, key_dim), (width, key_dim), (width, width), (key_dim, width), (1, 1)
    numbers = (torch.tensor(values) for values in ([0, 2], [2, 1], [-1, 0, -1]))
    prepared = [torch.zeros(3, 16, *size) for size in sizes]
    states = torch.zeros(2, 16, key_dim, key_dim + further)
    chunk_kernels.scan(prepared, *numbers, 1, states)
"""
# every head_dim and form, each target, one and several rows; all combinations are in the slow tests
FEW = {
    80: [{"head_dim": 8, "dtype": "float32"}, {"head_dim": 80, "rows": 1, "form": "KR"}],
    90: [{"head_dim": 256, "rows": 1}, {"head_dim": 128}, {"head_dim": 16, "rows": 1, "form": "KR", "shifted": True}],
    100: [{"head_dim": 96, "rows": 1}, {"head_dim": 64, "rows": 1000, "form": "MAT"}],
}


def test_every_head_dim_compiles_somewhere_and_other_kernels_for_hopper(compile_for):
    programs = [(target, calls(*launches) + OTHERS * (target == 90)) for target, launches in FEW.items()]
    compiled = dict(zip(FEW, compile_for(*chain(*programs)), strict=True))
    for target, launches in FEW.items():
        assert [name for name, _ in compiled[target]].count("attend_tiles") == len(launches)
    assert [name for name, _ in compiled[90][-16:-12]] == ["_rotate"] * 4
    assert compiled[90][-12:-4] == [*[("_move", 0)] * 3, ("_write", 0)] * 2
    assert [name for name, _ in compiled[90][-4:]] == ["_scan"] * 4
    assert all(shared <= 227 << 10 for _, shared in compiled[90][-4:]), "a multiprocessor of Hopper has 227 KiB"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_size_compiles_everywhere(compile_for, capability, head_dim, dtype):
    launches = [
        {"head_dim": head_dim, "dtype": dtype, "rows": rows, "form": form} for rows in (1, 12) for form in FORMS
    ]
    launches += [{"head_dim": head_dim, "dtype": dtype, "rows": 1000, "form": "MAT"}]
    launches += [
        {"head_dim": head_dim, "dtype": dtype, "rows": 1000, "form": form, "rotate_once": 1} for form in ("KR", "QR")
    ]
    kernels = [name for name, _ in compile_for(capability, calls(*launches))[0]]
    assert kernels.count("attend_tiles") == 7 and kernels.count("_copy_rotated") == 2


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("options", [{"shifted": True, "rotary_dim": 32}, {"interleaved": True}], ids=str)
def test_every_rotation_compiles_for_hopper(compile_for, options, head_dim):
    launches = [options | {"head_dim": head_dim, "rows": rows, "form": form} for rows in (1, 12) for form in FORMS]
    kernels = [name for name, _ in compile_for(90, calls(*launches))[0]]
    assert kernels.count("attend_tiles") == 6


# heads, kv heads, channels of a head and of its rotation: of the models that tests of the engine run
TEST_MODELS = {
    "stories260K": {"heads": 8, "kv_heads": 4, "head_dim": 8},
    "make_small": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "make_hybrid": {"heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEST_MODELS)
def test_models_of_tests_compile_for_hopper(compile_for, name):
    launches = [
        TEST_MODELS[name] | {"rows": rows, "dtype": "float32", "form": form} for rows in (1, 48) for form in FORMS
    ]
    kernels = [kernel for kernel, _ in compile_for(90, calls(*launches))[0]]
    assert kernels.count("attend_tiles") == 6
