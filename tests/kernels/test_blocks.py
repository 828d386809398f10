"""Gather, scatter and copy equal indexing, in every implementation."""

from types import SimpleNamespace

import pytest
import torch

from spanlab_kernels import blocks
from spanlab_kernels import row_kernels as compiled
from spanlab_kernels.blocks import copy, gather, scatter, write
from spanlab_kernels.testing import BLOCK_CASES, BlockCase, fresh, random_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCE = SimpleNamespace(
    gather=blocks.gather_reference,
    scatter=blocks.scatter_reference,
    write=blocks.write_reference,
    copy=blocks.copy_reference,
)
SERVERS = pytest.mark.parametrize("server", [REFERENCE, compiled], ids=["reference", "kernel"])
CASES = pytest.mark.parametrize("case", BLOCK_CASES, ids=str)


def make_pages(case, dtype=torch.float32, device="cpu"):
    return random_tensor(case.num_pages, case.page_size, case.heads, case.head_dim, dtype=dtype, device=device, seed=1)


def row(case, slot):
    """Page and offset of a slot, as the docstring defines them."""
    return slot // case.page_size, slot % case.page_size


@SERVERS
@CASES
def test_gather_takes_each_row_from_its_page(server, case, device):
    pages, (slots, _) = make_pages(case, device=device), case.two_sets(device)
    out = fresh(case.slots, case.heads, case.head_dim, device=device)
    assert server.gather(pages, slots, out) is out
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(out[i], pages[row(case, slot)])


@SERVERS
@CASES
def test_scatter_fills_its_slots_and_no_other(server, case, device):
    pages = fresh(case.num_pages, case.page_size, case.heads, case.head_dim, device=device)
    slots, _ = case.two_sets(device)
    values = random_tensor(case.slots, case.heads, case.head_dim, device=device, seed=2)
    server.scatter(pages, slots, values)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(pages[row(case, slot)], values[i])
        pages[row(case, slot)] = torch.nan
    assert pages.isnan().all()


@SERVERS
@CASES
def test_write_fills_its_slots_of_both_sets_and_no_other(server, case, device):
    shape, (slots, _) = (case.num_pages, case.page_size, case.heads, case.head_dim), case.two_sets(device)
    key_pages, value_pages = (fresh(*shape, device=device) for _ in "kv")
    # as a model projects them: heads before tokens; and channels first
    keys = random_tensor(case.heads, case.slots, case.head_dim, device=device, seed=2).transpose(0, 1)
    values = random_tensor(case.head_dim, case.heads, case.slots, device=device, seed=3).permute(2, 1, 0)
    server.write(key_pages, value_pages, slots, keys, values)
    for pages, written in ((key_pages, keys), (value_pages, values)):
        for i, slot in enumerate(slots.tolist()):
            assert torch.equal(pages[row(case, slot)], written[i])
            pages[row(case, slot)] = torch.nan
        assert pages.isnan().all()


@SERVERS
@CASES
def test_copy_changes_the_targets_alone(server, case, device):
    pages, (source, target) = make_pages(case, device=device), case.two_sets(device)
    before = pages.clone()
    server.copy(pages, source, target)
    for source_slot, target_slot in zip(source.tolist(), target.tolist(), strict=True):
        assert torch.equal(pages[row(case, target_slot)], before[row(case, source_slot)])
        pages[row(case, target_slot)] = before[row(case, target_slot)]
    assert torch.equal(pages, before)


@SERVERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_may_have_any_strides_and_slots_any_width(server, dtype, device):
    case = BlockCase(63, 16, 3, 80)
    values = random_tensor(80, 3, 63, dtype=dtype, device=device).permute(2, 1, 0)
    slots, _ = case.two_sets(device)
    pages = fresh(case.num_pages, case.page_size, 3, 80, dtype=dtype, device=device)
    server.scatter(pages, slots.to(torch.int32), values)
    out = fresh(63, 3, 80, dtype=dtype, device=device)
    assert torch.equal(server.gather(pages, slots.to(torch.int32), out), values)


@SERVERS
def test_a_slot_may_be_gathered_twice(server, device):
    case = BlockCase(2, 4, 1, 8)
    pages = make_pages(case, device=device)
    slots = torch.tensor([5, 0, 5], device=device)
    out = server.gather(pages, slots, fresh(3, 1, 8, device=device))
    assert torch.equal(out, torch.stack((pages[1, 1], pages[0, 0], pages[1, 1])))


def test_public_operations_agree_with_indexing():
    case = BlockCase(75, 16, 2, 8)
    pages, (source, target) = make_pages(case), case.two_sets()
    rows = pages.clone().flatten(0, 1)
    assert torch.equal(gather(pages, source), rows[source])
    out = fresh(75, 2, 8)
    assert gather(pages, source, out=out) is out
    copy(pages, source, target)
    rows[target] = rows[source]
    scatter(pages, source, 2 * out)
    rows[source] = 2 * out
    assert torch.equal(pages.flatten(0, 1), rows)
    key_pages, value_pages = pages.clone(), pages.clone()
    write(key_pages, value_pages, target, out, 3 * out)
    assert torch.equal(gather(key_pages, target), out) and torch.equal(gather(value_pages, target), 3 * out)


def test_no_slots_are_fine():
    case = BlockCase(4, 4, 1, 8)
    pages, none = make_pages(case), torch.zeros(0, dtype=torch.int32)
    before = pages.clone()
    assert gather(pages, none).shape == (0, 1, 8)
    for server in (REFERENCE, compiled):
        server.scatter(pages, none, torch.zeros(0, 1, 8))
        server.copy(pages, none, none)
    assert torch.equal(pages, before)


def test_kernel_reads_nan_and_writes_nothing_beyond_the_pages(device):
    memory = fresh(3, 2, 1, 8, device=device)
    pages = memory[1:2]  # so that a wild write would show
    pages.copy_(random_tensor(1, 2, 1, 8, device=device))
    before = memory.clone()
    slots = torch.tensor([-1, 0, 2], device=device)
    out = compiled.gather(pages, slots, torch.zeros(3, 1, 8, device=device))
    assert out.isnan().all(dim=(1, 2)).tolist() == [True, False, True]
    compiled.scatter(pages, slots[[0, 2]], torch.zeros(2, 1, 8, device=device))
    compiled.write(pages, pages, slots[[0, 2]], *torch.zeros(2, 2, 1, 8, device=device))
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)


PAGES = torch.zeros(3, 4, 2, 8)
SLOTS = torch.tensor([1, 2])
ROWS = torch.zeros(2, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather(PAGES[0], SLOTS), "pages must be a contiguous float tensor"),
        (lambda: gather(PAGES[:, :2], SLOTS), "pages must be a contiguous float tensor"),
        (lambda: gather(PAGES.long(), SLOTS), "pages must be .* torch.int64"),
        (lambda: gather(PAGES, SLOTS.float()), "slots must be a contiguous integer tensor"),
        (lambda: gather(PAGES, torch.arange(4)[::2]), "slots must be a contiguous integer tensor"),
        (lambda: gather(PAGES, torch.tensor([-1, 2])), r"slots must lie in \[0, 12\), not in \[-1, 2\]"),
        (lambda: gather(PAGES, torch.tensor([12])), r"slots must lie in \[0, 12\), not in \[12, 12\]"),
        (lambda: gather(PAGES, SLOTS, out=torch.zeros(8, 2, 2).permute(2, 1, 0)), "out must be contiguous"),
        (lambda: scatter(PAGES, SLOTS, torch.zeros(3, 2, 8)), r"values must be \(2, 2, 8\)"),
        (lambda: scatter(PAGES, SLOTS, torch.zeros(2, 2, 8).half()), "values must be .* not .* torch.float16"),
        (lambda: write(PAGES, PAGES, SLOTS, ROWS[:1], ROWS), r"keys must be \(2, 2, 8\)"),
        (lambda: write(PAGES, PAGES[:2], SLOTS, ROWS, ROWS), r"value_pages must be like key_pages, \(3, 4, 2, 8\)"),
        (lambda: write(PAGES, PAGES.double(), SLOTS, ROWS, ROWS), "values must be .* torch.float64"),
        (lambda: copy(PAGES, SLOTS, torch.tensor([3])), "target_slots must be as many as source_slots, 2, not 1"),
        (lambda: copy(PAGES, SLOTS, torch.tensor([3, 12])), "target_slots must lie in"),
    ],
)
def test_mismatched_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
