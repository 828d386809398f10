"""Position-independent caching in the simulator: by hand, and every published method jumped and stepped alike."""

import numpy as np
import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import Repair
from spanlab.core.request import Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.step import SpanReads, features
from spanlab.core.tree import isolated, whole
from spanlab.model_spec import GIB
from spanlab.records import LOSS_CAUSES
from spanlab.study.jobs import build_arrivals
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from . import serving

MS = 1_000_000
TIMING = ConstantTiming(0.001, seconds_per_step=0.01, seconds_per_decode_token=0.002)
SYSTEM, DOCUMENTS = np.arange(5), [np.arange(100 * n, 100 * n + 10 * n) for n in (1, 2, 3)]  # 10, 20, 30 tokens


def make_policy(**rules) -> TreePolicy:
    return make_tree_policy(ReuseRules(**rules))


def asked(number: int, order: list[int], question: int, system: bool = True) -> Request:
    """Documents in some order between a system prompt and a question of 4 tokens; one request a second."""
    spans = [Span(SYSTEM.astype(np.int32))] if system else []
    spans += [Span(DOCUMENTS[n].astype(np.int32), independent=True) for n in order]
    spans.append(Span(np.arange(900 + 10 * question, 904 + 10 * question, dtype=np.int32)))
    return Request(number, 0, tuple(spans), arrived_at=number * 1000 * MS)


def serve(policy: TreePolicy, requests: list[Request], reads: SpanReads | None = None) -> tuple[list, list]:
    """Records and the features of every step."""
    steps = []
    note = lambda step, now, result: steps.append(features(step, 0, policy.rules, reads))  # noqa: E731
    return list(serving.serve(requests, policy, TIMING, on_step=note)[0].values()), steps


def test_one_document_at_the_beginning_is_reused_as_a_prefix_is():
    requests = [asked(number, [1], number // 2, system=False) for number in range(6)]
    prefix, anywhere = (serve(make_policy(layout=layout), requests)[0] for layout in (whole, isolated))
    assert prefix == anywhere
    assert [record.reused_tokens for record in prefix] == [0, 23, 20, 23, 20, 23]


SHUFFLED = [asked(0, [0, 1, 2], 0), asked(1, [2, 0, 1], 1), asked(2, [0, 2, 1], 2), asked(3, [0, 1, 2], 0)]


def test_shuffled_documents_prefix_reuses_head_pic_all_documents():
    prefix, _ = serve(make_policy(layout=whole), SHUFFLED)
    assert [record.reused_tokens for record in prefix] == [0, 5, 5 + 10, 5 + 60 + 3]
    anywhere, _ = serve(make_policy(layout=isolated), SHUFFLED)
    assert [record.reused_tokens for record in anywhere] == [0, 5 + 60, 5 + 60, 5 + 60 + 3]
    assert [record.computed_tokens for record in anywhere] == [69, 4, 4, 1]
    assert [round((r.first_token_s - r.arrived_s) * 1000) for r in anywhere] == [79, 14, 14, 11]


def test_a_repair_is_paid_for_and_named():
    repaired, steps = serve(make_policy(layout=isolated, repair=Repair("first", k=4)), SHUFFLED)
    assert [record.repaired_tokens for record in repaired] == [12] * 4
    assert [record.lost_repair for record in repaired] == [0, 12, 12, 12]
    assert [record.reused_tokens for record in repaired] == [0, 53, 53, 56]
    # the cold prompt computes its spans, and 12 of their tokens again
    assert [step.prefill_tokens for step in steps] == [69 + 12, 12 + 4, 12 + 4, 12 + 1]
    assert not any(step.shallow_token_layers or step.copied_tokens for step in steps)


@pytest.mark.parametrize("kind", ["deviation", "deviation_gradual"])
def test_a_measured_repair_pays_for_profiling_and_copies(kind):
    rule = Repair(kind, ratio=0.1, check_layer=2, filter="layers")
    records, steps = serve(make_policy(layout=isolated, repair=rule, copies=True), SHUFFLED)
    assert [record.repaired_tokens for record in records] == [6] * 4
    assert [record.copied_tokens for record in records] == [60] * 4
    assert [step.copied_tokens for step in steps] == [60] * 4
    assert [step.shallow_token_layers for step in steps] == [54 * 3] * 4
    assert not any(step.projected_tokens for step in steps)


def test_tokens_that_the_check_layer_filters_pass_its_projections_only():
    rule = Repair("deviation", ratio=0.1, base="prompt")
    records, steps = serve(make_policy(layout=isolated, repair=rule, copies=True), SHUFFLED)
    assert [record.repaired_tokens for record in records] == [6] * 4  # of 65 before the question
    assert [step.shallow_token_layers for step in steps] == [54] * 4
    assert [step.projected_tokens for step in steps] == [54] * 4


def test_a_probe_pays_for_the_query_and_for_a_forward():
    """Four rows behind 65 pass layers 0 to 4; their keys are read by layer 5, too, and once more where it profiles."""
    rule = Repair("attention", k=4, layers=[3, 5])
    records, steps = serve(make_policy(layout=isolated, repair=rule), SHUFFLED)
    assert [record.repaired_tokens for record in records] == [12] * 4
    assert not any(step.copied_tokens for step in steps)
    assert [step.shallow_token_layers for step in steps] == [4 * 5] * 4
    assert [step.shallow_pair_layers for step in steps] == [(4 * 65 + 10) * (5 + 1 + 2)] * 4
    assert [step.projected_tokens for step in steps] == [4] * 4
    _, read_counts = serve(make_policy(layout=isolated, repair=rule), SHUFFLED, SpanReads())
    assert [step.num_forwards for step in read_counts] == [4, 3, 3, 3]  # spans, probe, repair, question


def test_neighbours_pay_for_the_attention_of_every_token():
    """Sixty tokens of spans from 5 on: 48 are left out behind layer 1, all are compared in layer 2."""
    rule = Repair("neighbours", k=4, check_layer=2)
    _, steps = serve(make_policy(layout=isolated, repair=rule, copies=True), SHUFFLED)
    before = [10 * 5 + 20 * 15 + 30 * 35, 30 * 5 + 10 * 35 + 20 * 45, 10 * 5 + 30 * 15 + 20 * 45]
    expected = [48 * 2 * 35 + 60 * 35 + pairs for pairs in (*before, before[0])]
    assert [step.shallow_token_layers for step in steps] == [48 * 2] * 4
    assert [step.shallow_pair_layers for step in steps] == expected
    assert [step.projected_tokens for step in steps] == [48] * 4


def test_pairs_of_a_span_are_within_the_span():
    """Rows of a span attend to the span, text to everything: 5 rows, then 10, 20, 30 alone, then 4 after 65."""
    _, steps = serve(make_policy(layout=isolated), SHUFFLED[:2])
    triangle = {n: n * (n + 1) // 2 for n in (4, 5, 10, 20, 30)}
    assert steps[0].prefill_pairs == sum(triangle.values()) + 4 * 65
    assert steps[0].prefill_context == 65
    assert (steps[1].prefill_pairs, steps[1].prefill_context) == (triangle[4] + 4 * 65, 65)
    assert (steps[0].num_prefills, steps[0].num_first_tokens) == (5, 1)


def test_pairs_of_a_repair_are_those_of_rows_spread_evenly():
    _, steps = serve(make_policy(layout=isolated, repair=Repair("strided", ratio=0.2)), SHUFFLED[:2])
    assert steps[1].prefill_pairs == 12 * (5 + 65 + 1) // 2 + 4 * 65 + 10
    assert steps[1].prefill_context == (65 - 12) + 65


TOY = ("workload.documents=2", "workload.questions_per_document=3", "workload.output_tokens=12", "output.figures=false")
RAG = ("workload=rag", "workload.rag.requests=14", "workload.rag.k=3", "model=llama-3.2-1b", "arms=methods")


@pytest.fixture(scope="module")
def rag():
    """A small study of every method, under memory for about two of its prompts."""
    study = compose("smoke", [*TOY, *RAG, "arrivals.rate_rps=400", "load.rates_rps=[]", "load.arms=[]"])
    requests = build_workload(study.workload, "unused").requests
    return study, build_arrivals(study, requests, 0, study.arrivals.rate_rps)


@pytest.mark.parametrize("chunked", [True, False])
def test_jumped_and_stepped_runs_of_every_method_are_equal(chunked, rag):
    study, arrived = rag
    longest = max(request.num_tokens for request in arrived)
    study.store.kv_gib = (2.5 * longest + 12) * study.model.kv_bytes_per_token / GIB
    rules = BatchRules(max_num_batched_tokens=1024, max_num_seqs=4, enable_chunked_prefill=chunked)
    preempted = 0
    for name, arm in study.arms.items():
        runs = []
        for jump in (True, False):
            policy, records = build_policy(study, arm, 0, longest), []
            row = simulate(arrived, policy, rules, build_timing(study), records.append, jump=jump)
            runs.append((records, row.makespan_s, row.preemptions, row.inserted_bytes, row.evicted_bytes))
            policy.check()
        assert runs[0] == runs[1], name
        check_records(name, runs[0][0], len(arrived))
        preempted += runs[0][2]
    assert len(study.arms) == 20
    assert preempted, "memory was never short"


def check_records(name: str, records: list, requests: int) -> None:
    """All requests are there, every prompt token is accounted for, and all arms but one reuse something."""
    assert len(records) == requests
    for record in records:
        lost = sum(getattr(record, f"lost_{cause}") for cause in LOSS_CAUSES)
        assert record.reused_tokens + lost == record.prompt_tokens
        assert record.computed_tokens == lost
    assert (sum(record.reused_tokens for record in records) > 0) == (name != "none"), name
