"""Served prompts behind preambles reuse what brute force finds: a prefix in a tree, documents anywhere with PIC."""

import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.request import Request
from spanlab.study.jobs import build_arrivals

from ..core.factories import common
from .serving import serve

SIZE = ("workload.documents=6", "workload.questions_per_document=5", "workload.max_prompt_tokens=9000")
ALONE = ("model=llama-3.1-8b", "arms=pic", "store=unlimited", "batch=single", "seeds=[0]", "load.rates_rps=[]")
PROMPTS = (
    ("preamble=none",),
    ("preamble=mixed",),
    ("preamble=per_request",),
    ("preamble=mixed", "workload.documents_per_prompt=3"),
    ("preamble=mixed", "workload.documents_per_prompt=3", "workload.documents_order=own_first"),
    ("preamble=fixed", "workload.documents_per_prompt=2", "workload.question_position=before"),
)


def served(arm: str, prompts: tuple[str, ...]) -> tuple[list[Request], dict[int, int]]:
    """Requests in order of arrival, one at a time over an unlimited store, and the tokens that each one reused."""
    study = compose("quality_sim", [*ALONE, "load.arms=[]", *SIZE, *prompts])
    workload = build_workload(study.workload, "unused")
    arrived = build_arrivals(study, workload.requests, 0, study.arrivals.rate_rps)
    policy = build_policy(study, study.arms[arm], 0, 9000)
    records, _ = serve(arrived, policy, build_timing(study), study.batch)
    return arrived, {id: record.reused_tokens for id, record in records.items()}


@pytest.mark.parametrize("prompts", PROMPTS, ids=" ".join)
def test_radix_without_limit_reuses_every_common_prefix(prompts: tuple[str, ...]):
    arrived, reused = served("radix", prompts)
    seen: list[list[int]] = []
    for request in arrived:
        tokens = request.tokens.tolist()
        expected = max((common(tokens, earlier) for earlier in seen), default=0)
        assert reused[request.id] == min(expected, len(tokens) - 1)
        seen.append(tokens)


@pytest.mark.parametrize("prompts", PROMPTS, ids=" ".join)
def test_pic_without_limit_reuses_every_known_document(prompts: tuple[str, ...]):
    arrived, reused = served("pic", prompts)
    documents_so_far: set[bytes] = set()
    for request in arrived:
        documents = [span.tokens for span in request.spans if span.independent]
        assert reused[request.id] >= sum(len(tokens) for tokens in documents if tokens.tobytes() in documents_so_far)
        documents_so_far.update(tokens.tobytes() for tokens in documents)
    assert sum(reused.values()) > 0


def test_a_stamp_ends_prefix_reuse_and_leaves_documents():
    arrived, prefix = served("radix", ("preamble=per_request",))
    _, anywhere = served("pic", ("preamble=per_request",))
    assert set(prefix.values()) == {0}
    documents = {span.tokens.tobytes() for request in arrived for span in request.spans if span.independent}
    again = sum(len(span.tokens) for request in arrived for span in request.spans if span.independent)
    assert sum(anywhere.values()) == again - sum(map(len, documents)) // 4
