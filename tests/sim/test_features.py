"""Counted work of a step beyond its tokens: forwards, runs of keys, scans; by hand."""

import numpy as np

from spanlab.build import SPAN_READS
from spanlab.core import placement
from spanlab.core.admission import BatchRules
from spanlab.core.repair import Repair
from spanlab.core.request import Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.step import StepFeatures, features
from spanlab.core.tree import isolated
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from .serving import serve


def span(first: int, length: int, independent: bool = False) -> Span:
    return Span(np.arange(first, first + length, dtype=np.int32), independent)


def steps_of(request: Request, placer=None, budget: int = 8192, reads=None, **rules) -> list[StepFeatures]:
    policy = make_tree_policy(ReuseRules(**rules), placer=placer)
    steps: list[StepFeatures] = []
    note = lambda step, now, result: steps.append(features(step, 10, policy.rules, reads))  # noqa: E731
    serve([request], policy, ConstantTiming(0.001), BatchRules(budget), jump=False, on_step=note)
    return steps


def scans(request: Request, placer=None, budget: int = 8192) -> list[tuple[int, int]]:
    steps = steps_of(request, placer, budget, needs_states=True, grid=4)
    return [(step.scan_runs, step.scan_chunks) for step in steps]


def test_scans_are_cut_at_captures_and_padded():
    request = Request(0, 0, (span(0, 10),), output_len=3)
    decode = (1, 0)
    assert scans(request) == [(1, 3), decode, decode]
    assert scans(request, placement.every_n(4)) == [(3, 3), decode, decode]
    assert scans(request, placement.every_n(4), budget=6) == [(2, 2), (2, 2), decode, decode]


def test_a_single_row_takes_no_scan():
    assert scans(Request(0, 0, (span(0, 9),)), placement.every_n(8)) == [(2, 2)]
    assert scans(Request(0, 0, (span(0, 9),))) == [(1, 3)]


def test_attention_alone_scans_nothing():
    assert {(step.scan_runs, step.scan_chunks) for step in steps_of(Request(0, 0, (span(0, 9),)))} == {(0, 0)}


PROMPT = Request(0, 0, (span(0, 5), span(100, 10, True), span(200, 20, True), span(900, 4)), output_len=2)


def of_spans(**rules) -> list[tuple[int, int, int]]:
    steps = steps_of(PROMPT, layout=isolated, **rules)
    return [(step.num_forwards, step.span_reads, step.turned_keys) for step in steps]


def test_queries_are_rotated_for_every_run_of_keys_but_the_first():
    # the question and the decode read text, two documents and themselves; the others only themselves
    assert of_spans(reads=SPAN_READS["rotate_queries"]) == [(1, 3, 0), (1, 3, 0)]


def test_keys_are_rotated_as_they_are_read():
    assert of_spans(reads=SPAN_READS["rotate_keys"]) == [(1, 0, 5 + 10 + 20 + 39), (1, 0, 40)]


def test_rows_that_read_copies_or_repairs_need_another_forward():
    assert of_spans(reads=SPAN_READS["pre_rotated"], copies=True) == [(2, 0, 0), (1, 0, 0)]
    first = Repair("first", 2)
    assert [step[0] for step in of_spans(reads=SPAN_READS["rotate_queries"], repair=first)] == [3, 1]


def test_prefixes_run_in_one_forward():
    assert [step.num_forwards for step in steps_of(PROMPT)] == [1, 1]
