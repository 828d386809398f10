"""Studies of the engine: a device and a size are chosen apart, and the simulator runs the very same study."""

import functools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.settings import Study

HYBRID = ("quality_clean", "system_prompts_clean", "narrativeqa_clean")
ENTRIES = (*HYBRID, "pic_clean")
SIZES = {"toy": "narrativeqa_clean", "toy_long": "quality_clean", "full": "system_prompts_clean"}
SIZES |= {"full_long": "narrativeqa_clean", "full_attention": "pic_clean"}


@functools.cache
def composed(entry: str, *overrides: str) -> Study:
    """The study of an entry; composing takes a quarter of a second."""
    return compose(entry, list(overrides))


def changed(entry: str, *overrides: str) -> set[str]:
    """Which settings of an entry differ once something is overridden."""
    before, after = asdict(composed(entry)), asdict(composed(entry, *overrides))
    return {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_device_is_hardware_batch_and_where_torch_runs(entry: str):
    assert changed(entry, "device=cuda") == {"hardware", "batch", "engine"}


@pytest.mark.parametrize(("size", "entry"), SIZES.items())
def test_a_size_sets_model_store_workload_and_load(size: str, entry: str):
    assert changed(entry, f"size={size}") <= {"model", "store", "workload", "arrivals", "runs"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_twin_in_the_simulator_is_the_same_study(entry: str):
    assert composed(entry).backend == "engine"
    assert changed(entry, "backend=sim") == {"backend"}


@pytest.mark.parametrize("entry", HYBRID)
def test_arms_equal_those_of_the_simulated_study(entry: str):
    simulated = composed(entry.replace("clean", "sim")).arms
    arms = composed(entry).arms
    assert {name: arm for name, arm in arms.items() if arm == simulated.get(name, arm)} == arms
    assert len(set(arms) & set(simulated)) >= 12


def test_a_27b_group_is_a_sixteenth_of_quality_sim():
    group = composed("quality_clean", "size=full", "model=qwen3.5-27b-group", "store.total_gib=4")
    whole = composed("quality_sim")
    assert 16 * group.model.kv_bytes_per_token == whole.model.kv_bytes_per_token
    assert 16 * group.model.state_bytes == whole.model.state_bytes
    assert 16 * group.store.total_gib == whole.store.total_gib
    assert group.workload == whole.workload


def test_the_toy_shows_what_dense_states_cost(spanlab, tmp_path: Path):
    quiet = ("output.figures=false", "tracking.kind=none", "executor.kind=here", f"output.root={tmp_path}")
    done = spanlab("-cn", "quality_clean", "backend=sim", *quiet)
    assert done.code == 0, done.err
    (path,) = tmp_path.glob("*/*/summary.json")
    arms = json.loads(path.read_bytes())["arms"]
    saved = {name: arm["token_hit_rate"] for name, arm in arms.items()}
    ranked = ["none", "last", "balanced_12", "block_hash_align", "tail_1", "boundary"]
    assert sorted(ranked, key=saved.__getitem__) == ranked
    assert saved["balanced_12"] < min(saved["dp_3"], saved["branch"], saved["dp_3_branch"]) < saved["boundary"]
    assert arms["none"]["tokens"]["reused"] == 0
    dense, sparse = arms["balanced_12"], arms["branch"]
    assert dense["tokens"]["lost_by_cause"]["kv_evicted"] > 0
    assert sparse["tokens"]["lost_by_cause"]["kv_evicted"] == 0
    assert dense["bytes"]["state_resident_mean"] > sparse["bytes"]["state_resident_mean"]
