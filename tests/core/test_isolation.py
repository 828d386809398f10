"""Who finds what: tenants share nothing, and equal digests of different tokens are a miss."""

import numpy as np
import pytest

from spanlab.core.eviction.orders import PathNames
from spanlab.core.placement import every_n
from spanlab.core.policies import block_pool, named
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.chunks import ChunkPolicy
from spanlab.core.policies.tree_variants import ExactHashPolicy, WholePromptIndex
from spanlab.core.token_string import BlockWeights
from spanlab.core.tree import isolated

from ..support.policies import make_tree_policy
from .factories import doc, make_map_policy, make_policy, make_prompt, text
from .steps import serve_waves
from .test_admission import make_policy as make_admitting
from .test_block_policy import SIZE
from .test_block_policy import make_policy as make_blocks
from .test_block_policy import request as block_request
from .test_kept_repairs import make_policy as make_kept_repairs
from .test_sequences import sequences as make_sequences
from .test_sequences import slots as make_slots


@pytest.fixture
def colliding(monkeypatch):
    """Digests of positions alone: any two prefixes of one length collide, whatever their tokens and salts."""
    weightless = BlockWeights(1)
    weightless.each, weightless.total, weightless.ramp = np.zeros(SIZE, np.uint64), np.uint64(0), np.uint64(0)
    monkeypatch.setattr(block_pool, "_weights", lambda size: weightless)
    monkeypatch.setattr(block_pool, "_seed", lambda salt: 0)


def reused(policy, *prompts) -> list[int]:
    """Tokens that each prompt reuses on its first admission, served one after another."""
    finished = serve_waves(policy, [[one] for one in prompts])
    return [finished[one.id].first_plan.resume for one in prompts]


@pytest.mark.parametrize(("states", "last"), [("none", 8), ("align", 0)])  # states stand at ends of prompts alone
def test_a_collision_of_digests_is_a_miss(colliding, states, last):
    first, other = range(20), range(100, 120)
    tokens_of = [first, other, first, [*range(8), *range(50, 62)]]
    prompts = [block_request(index, tokens) for index, tokens in enumerate(tokens_of)]
    chains = [block_pool.Chain(prompt, SIZE).digests for prompt in prompts]
    assert chains[0] == chains[1] == chains[3]
    policy = make_blocks(states=states, retention=None)
    assert reused(policy, *prompts) == [0, 0, 16, last]
    policy.check()


def test_a_chunk_that_collides_is_a_miss(colliding):
    prompts = [block_request(index, tokens) for index, tokens in enumerate([range(20), range(100, 120), range(20)])]
    assert reused(make_chunks(), *prompts) == [0, 0, 16]


def test_a_collision_of_salts_is_a_miss(colliding):
    prompts = [block_request(index, range(20), cache_salt=salt) for index, salt in enumerate(["a", "b", "a"])]
    assert reused(make_blocks(), *prompts) == [0, 0, 16]


def test_an_output_that_collides_is_a_miss(colliding):
    spoken = block_request(0, range(8), output=9, output_ids=range(50, 59))
    follows = block_request(1, [*range(8), *range(50, 58), 1])
    differs = block_request(2, [*range(8), *range(70, 78), 1])
    assert reused(make_blocks(), spoken, follows, differs) == [0, 16, 8]


def make_chunks():
    return ChunkPolicy(BlockRules(SIZE), BlockStore(BlockPool(100), 1, 1))


POLICIES = {
    "tree": lambda: make_admitting("always"),
    "second_touch": lambda: make_admitting("second_touch"),
    "spans": lambda: make_policy(layout=isolated),
    "maps": lambda: make_map_policy(placer=every_n(1)),
    "kept_repairs": make_kept_repairs,
    "published_study": lambda: make_policy(private=True),
    "exact_hash": lambda: make_tree_policy(kind=ExactHashPolicy, index=WholePromptIndex),
    "chunks": make_chunks,
    "blocks": make_blocks,
    "sequences": make_sequences,
    "slots": lambda: make_slots(host=100, chunk=4),
    "blocks with states": lambda: make_blocks(states="align", retention=None),
}


def test_every_policy_that_shares_is_asked():
    assert set(named.POLICIES) - POLICIES.keys() == {"unshared"}


@pytest.mark.parametrize("name", POLICIES)
def test_tenants_share_nothing(name):
    policy = POLICIES[name]()
    spans = text(*range(8)), doc(*range(20, 30)), text(40, 41)
    salts = ["a"] * 3 + ["b"] * 2 + ["", "a"]
    prompts = [make_prompt(*spans, id=index, cache_salt=salt) for index, salt in enumerate(salts)]
    reused_tokens = reused(policy, *prompts)
    first_of_each = [0, 3, 5]
    assert [reused_tokens[index] for index in first_of_each] == [0, 0, 0]
    more = [text(50)] if name == "sequences" else []  # which reuses nothing of a prompt that is stored whole
    plans = [policy.match(make_prompt(*spans, *more, id=9, cache_salt=salt), 99) for salt in ("a", "c")]
    assert plans[0].reused > 0 == plans[1].reused
    assert (plans[1].matched, plans[1].seen) == (0, 0)


def names_of_entries(policy, *prompts) -> list[bytes]:
    """Serve prompts; return the names by which orders recognise the stored entries after their eviction."""
    reused(policy, *prompts)
    names = PathNames()
    return [names.of_node(node) for root in policy.index.all() for node in root.children.values()]


@pytest.mark.parametrize("name", ["tree", "spans", "kept_repairs", "published_study", "exact_hash"])
def test_evicted_entries_of_tenants_have_different_names(name):
    prompts = [make_prompt(text(*range(8)), id=index, cache_salt=salt) for index, salt in enumerate("ab")]
    assert len(set(names_of_entries(POLICIES[name](), *prompts))) == 2


def test_exact_hash_names_an_entry_by_its_whole_prompt():
    prompts = [make_prompt(text(*range(8), last), id=last) for last in (20, 21)]
    assert len(set(names_of_entries(POLICIES["exact_hash"](), *prompts))) == 2
