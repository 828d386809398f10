"""Allocation, writes, copies and checksums of pages."""

import pytest
import torch

from spanlab.engine.pages import PagePool, PoolShape

SHAPE = PoolShape(layers=3, pages=10, page_size=4, kv_heads=2, head_dim=8)


def make_pool(dtype: torch.dtype = torch.float32, *, poison: bool = False) -> PagePool:
    """A small pool on the CPU."""
    return PagePool(SHAPE, dtype, "cpu", poison=poison)


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of `count` tokens."""
    made = torch.randn(2, count, 2, 8, generator=torch.Generator().manual_seed(seed))
    return made[0], made[1]


def flat(pages: torch.Tensor) -> torch.Tensor:
    """Pages as one row of slots."""
    return pages.reshape(-1, *pages.shape[2:])


def slots_of(pages, start: int, stop: int) -> torch.Tensor:
    """Slots of tokens [start, stop) in these pages."""
    tokens = torch.arange(start, stop)
    return torch.tensor(pages)[tokens // SHAPE.page_size] * SHAPE.page_size + tokens % SHAPE.page_size


def test_pages_are_taken_all_or_none():
    pool = make_pool()
    first = pool.allocate(7)
    with pytest.raises(ValueError, match=r"^The pool of 10 pages has 3 free, and 4 were wanted at once\.$"):
        pool.allocate(4)
    assert pool.free_pages == 3
    assert sorted([*first, *pool.allocate(3)]) == list(range(10))


def test_giving_too_often_is_noticed():
    pool = make_pool()
    pages = pool.allocate(1)
    with pytest.raises(AssertionError, match="more often than it was held"):
        pool.free([*pages, *pages])
    pool.free(pages)
    with pytest.raises(AssertionError, match="more often than it was held"):
        pool.free(pages)


def test_free_pages_agree_with_a_count_by_hand_over_random_use():
    pool, allocated, chance = make_pool(), set(), torch.Generator().manual_seed(1)
    for _ in range(500):
        if torch.rand((), generator=chance) < 0.5 and pool.free_pages >= 2:
            pages = set(pool.allocate(2).tolist())
            assert not allocated & pages, "an allocated page was handed out"
            allocated |= pages
        else:
            some = {page for page in allocated if torch.rand((), generator=chance) < 0.5}
            pool.free(list(some))
            allocated -= some
        assert pool.free_pages == 10 - len(allocated)


def test_what_is_written_lies_in_its_layer_and_slots_only():
    pool = make_pool()
    keys, values = rows(5)
    slots = slots_of([7, 2], 1, 6)
    pool.write(1, slots, keys, values)
    assert torch.equal(flat(pool.keys(1))[slots], keys)
    assert torch.equal(flat(pool.values(1))[slots], values)
    untouched = torch.ones(40, dtype=torch.bool).index_fill(0, slots, False)
    assert not flat(pool.keys(1))[untouched].any()
    assert not any(pool.keys(layer).any() or pool.values(layer).any() for layer in (0, 2))


def test_strided_rows_are_written_as_they_read():
    pool = make_pool()
    keys, values = (states.transpose(0, 1).contiguous().transpose(0, 1) for states in rows(4))
    assert not keys.is_contiguous()
    pool.write(0, slots_of([3], 0, 4), keys, values)
    assert torch.equal(pool.keys(0)[3], keys)


def test_a_copy_is_equal_in_all_layers_and_leaves_the_rest():
    pool = make_pool()
    for layer in range(3):
        pool.write(layer, torch.arange(40), *rows(40, seed=layer))
    before = [(pool.keys(layer).clone(), pool.values(layer).clone()) for layer in range(3)]
    source, target = slots_of([4, 1], 0, 6), slots_of([9, 0], 2, 8)
    pool.copy(source, target)
    for layer, states in enumerate(before):
        for now, then in zip((pool.keys(layer), pool.values(layer)), states, strict=True):
            expected = flat(then).clone()
            expected[target] = expected[source]
            assert torch.equal(flat(now), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_changes_with_a_single_number_of_its_pages_only(dtype):
    pool = make_pool(dtype)
    pages = [2, 5]
    before = pool.checksum(pages)
    pool.keys(0)[3, 0, 0, 0] = 1
    assert pool.checksum(pages) == before
    pool.values(2)[5, 3, 1, 7] = -0.0  # equal as a number, another byte
    assert pool.checksum(pages) != before


def test_poisoned_pages_are_nan_until_written_and_when_free_again():
    pool = make_pool(poison=True)
    assert pool.keys(2).isnan().all() and pool.values(0).isnan().all()
    pages = pool.allocate(2)
    pool.write(0, slots_of(pages, 0, 8), *rows(8))
    assert not pool.keys(0)[pages].isnan().any()
    pool.free(pages[1:])
    assert not pool.keys(0)[pages[0]].isnan().any()
    assert pool.keys(0)[pages[1]].isnan().all() and pool.values(0)[pages[1]].isnan().all()


@pytest.mark.parametrize("key", ["layers", "pages", "page_size", "kv_heads", "head_dim"])
def test_a_size_of_nothing_is_named(key):
    with pytest.raises(ValueError, match=rf"^pool\.{key} is 0, expected a positive integer\.$"):
        PoolShape(**(vars(SHAPE) | {key: 0}))
