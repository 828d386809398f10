"""QuALITY's committed shape and its real text lead to the same decisions, arm by arm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.study.jobs import build_arrivals
from spanlab_sim.run import simulate

ALL_ARMS = ("only=[]",)
SOME_ARMS = ("only=[none,kv_only,block_hash_align,block_512,balanced_12,dp_8,radix_branch_last,boundary]",)
ONE_SEED = ("seeds=[0]", "load.rates_rps=[]", "load.arms=[]")


def local(shared: Path) -> tuple[str, ...]:
    return (
        "workload.source=local",
        f"workload.path={shared / 'quality' / 'quality_dev_matched.jsonl'}",
        f"workload.tokenizer={shared / 'tokenizers' / 'qwen2' / 'tokenizer.json'}",
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Where the text's tokens are kept from test to test."""
    return f"workload.cache_dir={tmp_path_factory.mktemp('cache')}"


def plans(study: Study, requests: tuple[Request, ...], arm: str) -> list[Any]:
    """Every step of one arm as plain numbers, with what each request reuses."""
    steps: list[Any] = []
    arrived = build_arrivals(study, requests, 0, study.arrivals.rate_rps)
    longest = max(request.num_tokens for request in requests)
    policy = build_policy(study, study.arms[arm], 0, longest)
    simulate(
        arrived,
        policy,
        study.batch,
        build_timing(study),
        lambda record: steps.append(("record", record.request_id, record.reused_tokens)),
        on_step=lambda step, now, result: steps.append((now, step.key())),
    )
    policy.check()
    return steps


@pytest.mark.parametrize(
    ("size", "store"),
    [
        pytest.param((*SOME_ARMS, "workload.documents=5"), "store.total_gib=1.5", id="5 articles, much is evicted"),
        pytest.param(ALL_ARMS, "store.total_gib=3", id="48 articles, much is evicted", marks=pytest.mark.slow),
        pytest.param(ALL_ARMS, "store.total_gib=64", id="48 articles, little is evicted", marks=pytest.mark.slow),
    ],
)
def test_records_are_equal_byte_for_byte(size, store, shared, cache, run_here, files_of, tmp_path: Path):
    shape = files_of(run_here(tmp_path / "shape", "quality_sim", *ONE_SEED, *size, store))
    text = files_of(run_here(tmp_path / "text", "quality_sim", *ONE_SEED, *size, store, *local(shared), cache))
    study = compose("quality_sim", list(size))
    assert len(shape) == 2 * len(study.runs.only or study.arms)
    assert [name for name in shape if shape[name] != text[name]] == []
    assert list(shape) == list(text)


@pytest.mark.parametrize(
    ("arm", "prompts"),
    [
        pytest.param("dp_8", (), marks=pytest.mark.slow),
        pytest.param("radix_branch_last", (), marks=pytest.mark.slow),
        ("block_hash_align", ()),
        ("dp_8", ("workload.documents_per_prompt=2", "workload.documents_order=own_first")),
    ],
    ids=["dp_8", "radix_branch_last", "block_hash_align", "two documents"],
)
def test_every_step_plan_is_equal(arm: str, prompts: tuple[str, ...], shared, cache):
    size = (*ONE_SEED, *prompts, "workload.documents=3", "batch.max_num_batched_tokens=2048")
    shape = compose("quality_sim", size)
    text = compose("quality_sim", [*size, *local(shared), cache])
    found = [plans(study, build_workload(study.workload, "unused").requests, arm) for study in (shape, text)]
    assert found[0] == found[1]
    assert any(step[0] == "record" and step[2] > 0 for step in found[0])


def test_the_comparison_can_fail(shared, cache):
    study = compose("quality_sim", [*ONE_SEED, "workload.documents=2", "workload.questions_per_document=6"])
    requests = build_workload(study.workload, "unused").requests
    other = tuple(
        replace(request, spans=tuple(replace(span, ids=span.tokens + request.id) for span in request.spans))
        for request in requests
    )
    assert plans(study, requests, "block_512") != plans(study, other, "block_512")
