"""Our eviction orders as vLLM's cache policies; ours named `lru` evicts what vLLM's own does.

`vllm_0_32_offload.json` holds what vLLM 0.32.0's LRU evicted in the cases of `chunk_ops`; the marker `oracle` runs vLLM
again, with its manager over our policies.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from spanlab import vllm_policy
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, REQUESTS
from spanlab.core.releases import RELEASES
from spanlab.core.store import recount
from spanlab.vllm_policy import ChunkPolicy, checked

from .chunk_ops import Chunk, Replay, Request, key_of

HERE = Path(__file__).parent
STORED = json.loads((HERE / "vllm_0_32_offload.json").read_text())
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))
UNFIT = [*EVICTION_ORDERS.needing(FUTURE), *EVICTION_ORDERS.needing(REQUESTS)]
ORDERS = [order for order in EVICTION_ORDERS if order not in UNFIT]
STEPS = 150


def policy(order: str, capacity: int, **options) -> ChunkPolicy:
    """The result of `cache_policy`, without vLLM's base class."""
    return type(order, (ChunkPolicy,), {"order": order, "options": options})(capacity)


def evicted(seed: int) -> list:
    capacity = 3 + seed % 30
    return Replay(policy("lru", capacity), capacity, seed).run(STEPS)


@pytest.mark.parametrize("seed", sorted(STORED, key=int))
def test_lru_evicts_the_stored_chunks_of_vllm(seed):
    assert evicted(int(seed)) == STORED[seed]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_keeps_vllms_contract(order):
    replay = Replay(policy(order, 12), 12, 7)
    assert any(replay.run(STEPS))
    recount(replay.policy._store, [replay.policy._root])


@pytest.mark.parametrize(("protected", "victim"), [(0.67, 3), (0.34, 1)])
def test_options_change_the_evicted_chunks(protected, victim):
    slru = policy("slru", 3, protected=protected)  # two of the three chunks are protected, or one
    for number in (1, 2):
        slru.insert(key_of(number), ready())
        slru.touch([key_of(number)], Request([]))
    slru.insert(key_of(3), ready())
    assert [key for key, _ in slru.evict(1, set())] == [key_of(victim)]


def ready() -> Chunk:
    chunk = Chunk()
    chunk.ref_cnt = 0
    return chunk


def test_refused_eviction_changes_nothing():
    lru = policy("lru", 3)
    for number in (1, 2, 3):
        lru.insert(key_of(number), ready())
    lru.mark_non_evictable(key_of(1))
    assert lru.evict(2, {key_of(2)}) is None
    assert all(lru.get(key_of(number)) for number in (1, 2, 3))
    lru.mark_evictable(key_of(1))
    assert [key for key, _ in lru.evict(2, {key_of(2)})] == [key_of(1), key_of(3)]


def test_the_arguments_of_either_release_are_taken():
    """0.33 names the request of an insertion, and tells each first access."""
    lru, request = policy("lru", 3), Request([])
    lru.insert(key_of(1), ready())
    lru.insert(key_of(2), ready(), request)
    lru.on_request_access([key_of(1), key_of(3)], request)
    assert [key for key, _ in lru.evict(1, set())] == [key_of(1)]


def test_cleared_policy_is_new():
    lru = policy("lru", 2)
    lru.insert(key_of(1), Chunk())
    lru.clear()
    assert lru.get(key_of(1)) is None
    assert lru.evict(1, set()) is None


@pytest.mark.parametrize(
    ("order", "options", "sentence"),
    [
        ("belady", {}, "eviction_policy=belady: expected one of"),
        ("priority", {}, "eviction_policy=priority: expected one of"),
        ("sive", {}, "did you mean sieve?"),
        ("slru", {"share": 1}, "cache_policy.options.share: no such option of slru; expected one of protected"),
    ],
)
def test_impossible_policies_are_refused(order, options, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the sentence is the result
        checked(order, options)
    assert sentence in str(error.value)


def test_other_names_are_not_policies():
    assert not hasattr(vllm_policy, "lru")


def ask(tmp_path: Path, *arguments: str, release: str = "vllm_0_32") -> dict:
    out = tmp_path / "told.json"
    before = PYTHON.parents[1] / "releases" / release  # where it is not the environment's own
    environment = {**os.environ, "PYTHONPATH": f"{before}{os.pathsep}{HERE.parents[1] / 'src'}"}
    subprocess.run([PYTHON, HERE / "vllm_offload_driver.py", *arguments, out], check=True, env=environment)
    return json.loads(out.read_text())


@pytest.mark.oracle
def test_lru_evicts_the_same_chunks_as_vllm(tmp_path: Path):
    told = ask(tmp_path, "lru", "1000", "1100")
    assert {seed: evicted(int(seed)) for seed in told} == told


@pytest.mark.oracle
@pytest.mark.parametrize("release", RELEASES)
def test_vllms_manager_runs_every_order(tmp_path: Path, release: str):
    told = ask(tmp_path, "serve", ",".join(ORDERS), release=release)
    assert told["spanlab_lru"] == told["lru"]
    hits = {name: sum(found for found, _ in rows) for name, rows in told.items()}
    assert hits.keys() == {"lru", *(f"spanlab_{order}" for order in ORDERS)}
    assert min(hits.values()) > 0
    assert hits["spanlab_slru"] != hits["lru"] != hits["spanlab_fifo"]
