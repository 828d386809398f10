"""Each preset on an example worked by hand from its published description; one byte for a token."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler

from .presets import build

_numbers = itertools.count()


def prompt(*runs: tuple[int, int]) -> Request:
    """A prompt of runs of token ids, each as (first id, count)."""
    tokens = np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in runs])
    return Request(next(_numbers), 0, (Span(tokens),))


def ask(policy, request: Request, output: int = 0) -> int:
    """Serve one request alone, to its end; returns the tokens that it reused."""
    policy.start_step(0)
    plan = policy.match(request, 0)
    allocation = policy.allocate(plan, 0)
    start = plan.resume
    while start < plan.prompt:
        stop = policy.chunk_end(plan, start, plan.prompt, plan.prompt, 0)
        assert policy.append(allocation, start, stop)
        policy.insert(allocation, stop, 0)
        start = stop
    if output:
        assert policy.append(allocation, start, start + output)
    policy.finish(allocation, output, 0)
    policy.free(allocation, 0)
    policy.check()
    return plan.resume


def schedule(policy, request: Request) -> int:
    """Serve one request step by step, decoding included; returns the tokens that it reused."""
    scheduler, now = Scheduler(policy, BatchRules()), 0
    scheduler.add(request)
    while not scheduler.idle:
        step = scheduler.schedule(now)
        asked = [chunk.sequence for chunk in step.chunks if chunk.last] + step.decodes
        ended = [one for one in asked if one.generated + 1 >= one.request.output_len]
        now += 1
        scheduler.complete(step, now, ended)
        reused = [one.first_plan.resume for one in ended]
    policy.check()
    return reused[0]


A, B, C, D = (10_000 * number for number in range(1, 5))


def test_exact_hash_finds_repeated_prompts_alone():
    policy = build("exact_hash", total=1000)
    assert ask(policy, prompt((A, 100)), output=20) == 0
    assert ask(policy, prompt((A, 100))) == 99  # one token is computed, for its logits
    assert ask(policy, prompt((A, 99))) == 0  # a beginning of it is another prompt
    assert ask(policy, prompt((A, 100), (B, 10))) == 0  # and so is its continuation
    assert policy.store.kv_cached == 100 + 99 + 110  # nothing is shared, no output is kept


def test_radix_adr_evicts_by_hits_then_recency():
    policy = build("radix_adr", total=300)
    assert ask(policy, prompt((A, 100))) == 0
    assert ask(policy, prompt((A, 60), (B, 40))) == 60  # a match may end inside an edge
    assert ask(policy, prompt((A, 100))) == 99  # a full match leaves one token
    # Stored: A[0:60] with 2 uses, then A[60:99], A[99:100] behind it, and B[0:40] with none.
    # 140 bytes are used. A prompt of 200 needs 40 more than there are: B, which was never hit, leaves alone.
    assert ask(policy, prompt((C, 200))) == 0
    assert policy.store.kv_cached == 300
    assert ask(policy, prompt((A, 100))) == 99


def test_radix_adr_makes_room_until_a_prompt_fits():
    policy = build("radix_adr", total=300)
    for document in (A, B, C):
        ask(policy, prompt((document, 100)))
    assert ask(policy, prompt((D, 250))) == 0  # three leaves go, where the sketch evicted once
    assert policy.store.kv_cached == 250


def test_trtllm_reuses_blocks_of_32_and_frees_the_oldest_leaf():
    policy = build("trtllm", total=320)
    assert ask(policy, prompt((A, 100))) == 0  # three full blocks are stored: 96 tokens
    assert policy.store.kv_cached == 96
    assert ask(policy, prompt((A, 90))) == 64  # two full blocks of 32 match; partial reuse would add 25
    assert ask(policy, prompt((B, 130)), output=40) == 0  # 169 tokens have KV: 5 blocks with the output
    assert policy.store.kv_cached == 96 + 160
    # 64 bytes are left. A prompt of 100 needs 36 more: two leaf blocks of A leave, its last two, for A is older.
    assert ask(policy, prompt((C, 100))) == 0
    assert ask(policy, prompt((A, 100))) == 32


def test_trtllm_keeps_blocks_of_high_priority():
    ranges = [{"start": 0, "stop": 64, "priority": 100}]
    policy = build("trtllm", total=320, eviction_options={"ranges": ranges})
    ask(policy, prompt((A, 100)))  # A's first two blocks have priority 100, its third 35
    ask(policy, prompt((B, 130)))  # and so have B's of its four
    # 96 bytes are left. A prompt of 200 needs 104 more, four blocks. Blocks of 35 go first: A's third and
    # B's last two, all of them leaves by then. Then the oldest leaf of 100: A's second.
    assert ask(policy, prompt((C, 200))) == 0
    assert ask(policy, prompt((B, 130))) == 64
    policy = build("trtllm", total=320)  # all alike: A's three blocks go, then B's last
    for document, length in ((A, 100), (B, 130), (C, 200)):
        ask(policy, prompt((document, length)))
    assert ask(policy, prompt((B, 130))) == 96


def test_trtllm_finds_blocks_after_the_step_that_computes_them():
    assert not build("trtllm", total=320).stores_when_scheduled


def test_lmcache_keeps_whole_chunks_of_prompts():
    policy = build("lmcache", total=10 * 256)
    assert ask(policy, prompt((A, 700)), output=200) == 0
    assert policy.store.kv_cached == 512  # two chunks; neither the 188 tokens behind them nor the output
    assert ask(policy, prompt((A, 700), (B, 300))) == 512
    assert policy.store.kv_cached == 3 * 256  # 700 + 300 tokens are three whole chunks


def test_lmcache_evicts_new_chunks_from_their_first():
    policy = build("lmcache", total=(4 + 2) * 256)  # room for four chunks, beside the null block and last tokens
    ask(policy, prompt((A, 600)))  # chunks A0, A1: the older first
    ask(policy, prompt((B, 600)))  # A0, A1, B0, B1
    assert ask(policy, prompt((C, 300))) == 0  # A0 leaves, and A1 is out of reach
    assert ask(policy, prompt((A, 600))) == 0
    policy = build("lmcache", total=(4 + 2) * 256)
    ask(policy, prompt((A, 600)))
    assert ask(policy, prompt((A, 600))) == 512  # what was read ages from its last chunk: A1, A0
    ask(policy, prompt((B, 600)))
    assert ask(policy, prompt((C, 300))) == 0  # A1 leaves
    assert ask(policy, prompt((A, 600))) == 256


STATE = 1000


def test_marconi_stores_states_at_branches_and_ends():
    policy = build("marconi", total=1 << 20, state=STATE)
    first = prompt((A, 100), (B, 50))
    assert ask(policy, first) == 0
    assert policy.checkpoints(first) == [150]  # nothing is stored yet, so no branch is seen
    second = prompt((A, 100), (C, 50))
    assert ask(policy, second) == 0  # KV of 100 tokens matches, no state lies within
    assert policy.checkpoints(second) == [100, 150]
    third = prompt((A, 100), (D, 50))
    assert ask(policy, third) == 100
    assert policy.checkpoints(third) == [100, 150]  # the branch has its state: only the end is new
    assert policy.store.state_cached == 4 * STATE


def test_marconi_keeps_a_state_behind_the_output():
    policy, answer = build("marconi", total=1 << 20, state=STATE), (C, 20)
    first = replace(prompt((A, 100)), output_len=20, output=np.arange(C, C + 20, dtype=np.int32))
    assert schedule(policy, first) == 0
    following = prompt((A, 100), answer, (D, 30))
    assert policy.checkpoints(following) == [100, 119]  # the last output token is never computed
    assert schedule(policy, following) == 119


def test_marconi_keeps_the_older_of_two_states_that_saves_more():
    # Room for four states, of which a running request takes one. A's saves 400 tokens, B's and C's save 100 each: work
    # per byte is 0.4, 0.1, 0.1, which is 1, 0, 0 once scaled. Recency 1 / age, scaled, is 0 for A, 1 for C and between
    # them for B. The sums are 1, less than 1, and 1: B's state leaves, where LRU evicts A's.
    sizes = {"total": 1 << 20, "states": 4 * STATE, "state": STATE}
    policy = build("marconi", **sizes, eviction="marconi", eviction_options={"alpha": 1.0})
    prompts = [prompt((A, 400)), prompt((B, 100)), prompt((C, 100))]
    for one in prompts:
        ask(policy, one)
    ask(policy, prompt((D, 200)))
    assert [policy.checkpoints(one) for one in prompts] == [[400], [], [100]]


def test_trtllm_hybrid_keeps_a_snapshot_every_256_tokens():
    policy = build("trtllm_hybrid", total=1 << 20, state=STATE, grid=64)
    first = prompt((A, 700))
    assert ask(policy, first) == 0
    assert policy.checkpoints(first) == [256, 512]
    assert ask(policy, prompt((A, 600), (B, 100))) == 512
    assert ask(policy, prompt((A, 500), (B, 100))) == 256  # 480 tokens match in blocks; no snapshot lies behind 256
    assert ask(policy, prompt((A, 200), (B, 100))) == 0


PAGE = 1536


def test_mooncake_kda_keeps_prompt_ends_second_sights_and_an_interval():
    policy = build("mooncake_kda", total=1000 * PAGE, state=PAGE)
    first = prompt((A, 9 * PAGE + 100))
    assert ask(policy, first) == 0
    assert policy.checkpoints(first) == [7 * PAGE, 9 * PAGE]  # the interval, and the last page that is full
    assert ask(policy, prompt((A, 8 * PAGE), (B, PAGE))) == 7 * PAGE
    # Five pages match and no state lies within: the second sight stores one there, the third reads it.
    assert ask(policy, prompt((A, 5 * PAGE + 7), (C, PAGE))) == 0
    assert ask(policy, prompt((A, 5 * PAGE + 7), (D, PAGE))) == 5 * PAGE
    assert ask(policy, prompt((A, PAGE - 1), (D, 9))) == 0  # less than a page


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("lmcache", {"eviction": "lfu"}, "arms.lmcache.eviction=lfu with policy=chunks: a pool of blocks has no such"),
        ("exact_hash", {"eviction": "belady"}, "eviction=belady with policy=exact_hash: expected a policy that shares"),
        ("exact_hash", {"spans": {}}, "policy=exact_hash with a layout named isolated: expected spans=null"),
        ("mooncake_kda", {"pool": {"retention": 0}}, "pool.cut=True with retention=0: expected a retention in tokens"),
    ],
)
def test_keys_without_meaning_are_refused(name, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(name, total=1 << 20, **changes)


def test_chunks_of_hybrid_models_are_refused():
    with pytest.raises(ValueError, match=r"policy=chunks with model\.name=toy: expected a model of attention layers"):
        build("lmcache", total=1 << 20, state=STATE)
