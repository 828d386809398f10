"""Rotation is multiplication by a complex number of length one, in every implementation."""

from functools import partial

import pytest
import torch

from spanlab_kernels import AngleTable
from spanlab_kernels import row_kernels as compiled
from spanlab_kernels.blocks import angle_table, rotate, rotate_reference
from spanlab_kernels.testing import ROPE_CASES, RopeCase, agrees, fresh, inverse_powers, random_tensor

from .attention_layouts import rotate as by_complex_numbers

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BASE = 500_000.0
rotated_exactly = partial(by_complex_numbers, base=BASE)


def make_table(case, device="cpu", length=4097):
    return angle_table(inverse_powers(case.rotary_dim, BASE), length, device)


def make_x(case, dtype=torch.float32, device="cpu"):
    return random_tensor(case.tokens, case.heads, case.head_dim, dtype=dtype, device=device, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_reference_is_the_complex_product(case, dtype):
    x = make_x(case, dtype)
    result = rotate(x, case.shifts(), make_table(case), interleaved=case.interleaved)
    truth = rotated_exactly(x, case.shifts(), case)
    assert agrees(result, truth, truth.to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_kernel_is_the_complex_product(case, dtype, device):
    x, table = make_x(case, dtype, device), make_table(case, device)
    out = fresh(*x.shape, dtype=dtype, device=device)
    result = compiled.rotate(x, case.shifts(device), table, interleaved=case.interleaved, out=out)
    assert result is out
    truth = rotated_exactly(x.cpu(), case.shifts(), case)
    assert agrees(result.cpu(), truth, truth.to(dtype), dtype)
    assert torch.equal(result[..., case.rotary_dim :], x[..., case.rotary_dim :])


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
@pytest.mark.parametrize("launch", [rotate_reference, compiled.rotate], ids=["reference", "kernel"])
def test_in_place_is_the_same(case, launch, device):
    x, table = make_x(case, torch.bfloat16, device), make_table(case, device)
    shift = case.shifts(device)
    apart = launch(x, shift, table, interleaved=case.interleaved, out=fresh(*x.shape, dtype=x.dtype, device=device))
    before = x.data_ptr()
    within = launch(x, shift, table, interleaved=case.interleaved, out=x)
    assert within.data_ptr() == before
    assert torch.equal(within, apart)


@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_takes_any_strides_and_writes_nothing_beside_them(interleaved, device):
    case = RopeCase(63, 3, 32, 24, None, interleaved=interleaved)
    x = random_tensor(3, 32, 63, device=device, seed=1).permute(2, 0, 1)
    wide = fresh(63, 5, 40, device=device)
    out = wide[:, 1:4, 4:36]
    compiled.rotate(x, case.shifts(device), make_table(case, device), interleaved=interleaved, out=out)
    truth = rotated_exactly(x.cpu(), case.shifts(), case)
    assert agrees(out.cpu(), truth, truth.float(), torch.float32)
    out.fill_(torch.nan)
    assert wide.isnan().all()


@pytest.mark.parametrize("launch", [rotate_reference, compiled.rotate], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_shift_copies_exactly(launch, dtype, device):
    case = RopeCase(75, 2, 96, 64, 0)
    x, table = make_x(case, dtype, device), make_table(case, device)
    none = torch.zeros(case.tokens, dtype=torch.int32, device=device)
    for shift in (0, none):
        out = launch(x, shift, table, interleaved=False, out=fresh(*x.shape, dtype=dtype, device=device))
        assert torch.equal(out, x)


@pytest.mark.parametrize("launch", [rotate_reference, compiled.rotate], ids=["reference", "kernel"])
def test_a_constant_shift_is_the_same_shift_for_each_token(launch, device):
    case = RopeCase(63, 2, 64, 64, -37)
    x, table = make_x(case, device=device), make_table(case, device)
    each = torch.full((63,), -37, device=device)  # int64, while cases draw int32
    results = [launch(x, shift, table, interleaved=False, out=fresh(*x.shape, device=device)) for shift in (-37, each)]
    assert torch.equal(*results)


@pytest.mark.parametrize("launch", [rotate_reference, compiled.rotate], ids=["reference", "kernel"])
def test_a_million_positions_away_is_as_exact_as_next_door(launch, device):
    case = RopeCase(64, 2, 16, 16, None, reach=1_000_000)
    table = make_table(case, device, length=1_000_001)
    x = make_x(case, device=device)
    out = launch(x, case.shifts(device), table, interleaved=False, out=fresh(*x.shape, device=device))
    truth = rotated_exactly(x.cpu(), case.shifts(), case)
    assert float((out.cpu() - truth).abs().max()) < 6e-7


def test_nothing_to_turn_is_fine():
    case = RopeCase(0, 2, 64, 64, 3)
    x, table = make_x(case), make_table(case)
    assert rotate(x, 3, table).shape == (0, 2, 64)
    assert rotate(x, torch.zeros(0, dtype=torch.int32), table).shape == (0, 2, 64)
    assert compiled.rotate(x, 3, table, interleaved=False, out=torch.empty_like(x)).shape == (0, 2, 64)


def test_kernel_shows_a_shift_beyond_the_table_as_nan(device):
    case = RopeCase(3, 1, 32, 16, None)
    x = make_x(case, device=device)
    shift = torch.tensor([7, 8, -8], dtype=torch.int32, device=device)
    out = compiled.rotate(x, shift, make_table(case, device, 8), interleaved=False, out=torch.zeros_like(x))
    assert out[:, :, :16].isnan().all(dim=(1, 2)).tolist() == [False, True, True]
    assert torch.equal(out[..., 16:], x[..., 16:])


# Relative error of keys that moved 20,000 positions at base 5e5, against the exact rotation of the stored raw key.
WAYS = ("deferred", "angles cast", "once", "twice", "10 in place", "100 in place")
PRECISION = {
    torch.bfloat16: (5e-8, 1.3e-3, 1.7e-3, 2.3e-3, 7.2e-3, 4.8e-2),
    torch.float16: (5e-8, 1.7e-4, 2.1e-4, 2.9e-4, 7.0e-4, 6.2e-3),
    torch.float32: (5e-8, 5e-8, 5e-8, 6e-8, 2.3e-7, 2.0e-6),
}


def errors_of_moving(dtype, far=20_000):
    case = RopeCase(500, 2, 128, 128, far)
    raw, table = make_x(case, dtype), make_table(case, length=far + 1)
    truth = rotated_exactly(raw, far, case)
    cast = AngleTable(*(side.to(dtype).float() for side in (table.cos, table.sin)))
    keys = [rotate(raw.float(), far, table), rotate(raw.float(), far, cast), rotate(raw, far, table)]
    keys.append(rotate(rotate(raw, 7_000, table), 13_000, table))
    for steps in (10, 100):
        key = raw.clone()
        for _ in range(steps):
            rotate(key, far // steps, table, out=key)
        keys.append(key)
    return [float((key - truth).norm() / truth.norm()) for key in keys]


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_every_further_rounding_has_its_known_cost(dtype):
    errors = dict(zip(WAYS, errors_of_moving(dtype), strict=True))
    for way, expected in zip(WAYS, PRECISION[dtype], strict=True):
        assert expected / 1.5 < errors[way] < 1.5 * expected, (way, errors[way])
    order = list(errors.values())
    if dtype == torch.float32:
        order = order[2:]  # with nothing to cast, the first three are the same
    assert order == sorted(set(order))


X = torch.zeros(3, 2, 8)
SMALL = angle_table(inverse_powers(8), 5)


@pytest.mark.parametrize(
    ("x", "shift", "table", "out", "message"),
    [
        (X[0], 1, SMALL, None, "x must be"),
        (X.long(), 1, SMALL, None, "x must be .* torch.int64"),
        (X[..., :6], 1, SMALL, None, "rotary_dim must be at most head_dim, 6, not 8"),
        (X, 1, SMALL, X[:2], "out must be like x"),
        (X, 1, SMALL, X.half(), "out must be like x"),
        (X, 5, SMALL, None, "length, 5, not 5"),
        (X, torch.tensor([0, -6, 1]), SMALL, None, "length, 5, not 6"),
        (X, torch.tensor([0, 1]), SMALL, None, "shift must be an int or an integer tensor"),
        (X, torch.tensor([0.0, 1.0, 2.0]), SMALL, None, "shift must be .* torch.float32"),
    ],
)
def test_mismatched_arguments_are_refused(x, shift, table, out, message):
    with pytest.raises(ValueError, match=message):
        rotate(x, shift, table, out=out)
