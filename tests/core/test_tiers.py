"""Contents of a tier: room by watermark, quantising, pins, exclusive loads."""

from spanlab.core.tiers import Tier, TierRules

BLOCK, SMALL = 8, 2
GIB = 1 << 30


def make_tier(blocks: int, **more) -> Tier:
    return Tier("tier", TierRules(gib=blocks * BLOCK / GIB, bandwidth_gb_s=1.0, **more), BLOCK, SMALL)


def fill(tier: Tier, *keys: str) -> list[str]:
    """Write blocks one by one; returns what left."""
    evicted = []
    for key in keys:
        evicted += tier.reserve(key) or []
        tier.complete_writes([key])
        tier.counts.evicted = len(evicted)
        tier.check()
    return evicted


def stored(tier: Tier, keys: str) -> str:
    return "".join(key for key in keys if key in tier)


def test_the_least_recently_used_leaves():
    tier = make_tier(3)
    fill(tier, *"abc")
    tier.touch("a")
    assert fill(tier, "d") == ["b"]
    assert stored(tier, "abcd") == "acd"


def test_room_is_made_down_to_the_low_watermark():
    tier = make_tier(10, high=0.8, low=0.4)
    assert fill(tier, *"abcdefgh") == []
    assert fill(tier, "i") == list("abcd")
    assert tier.peak == 8 * BLOCK


def test_quantised_blocks_make_room_before_any_leaves():
    tier = make_tier(4, action="quantise", quantise_to="int4")
    assert fill(tier, *"abcde") == []
    assert [tier.bytes_of(key) for key in "abcde"] == [SMALL, SMALL, BLOCK, BLOCK, BLOCK]
    while not (evicted := fill(tier, f"more{tier.counts.written}")):
        pass
    assert evicted == ["a"], "what is whole is quantised first"


def test_a_pinned_block_stays():
    tier = make_tier(2)
    fill(tier, *"ab")
    tier.pin("ab")
    assert tier.reserve("c") is None
    assert tier.counts.refused == 1
    tier.check()
    tier.unpin("ba")
    assert fill(tier, "c") == ["b"]


def test_a_refused_block_drives_none_out():
    tier = make_tier(2)
    fill(tier, *"ab")
    tier.pin("a")
    tier.reserve("c")
    assert tier.reserve("d") is None
    assert tier.stores_or_receives("c")
    assert "c" not in tier


def test_an_exclusive_tier_gives_blocks_away():
    tier = make_tier(2, write="back")
    fill(tier, *"ab")
    tier.pin("a")
    tier.unpin("a")
    tier.check()
    assert stored(tier, "ab") == "b"
    assert tier.used == BLOCK
