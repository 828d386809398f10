"""A shape preserves everything that policies depend on."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.request import Request, Span
from spanlab.workloads.make_shape import make_shape
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import ARRAYS, SHAPES, expand, load, measure, save
from spanlab.workloads.workload import Provenance, Workload, shared_length

from .factories import check_equal_prefixes, check_equals_committed, load_workload

FIRST_END, SECOND_END = 100, 101


def make_span(tokens: list[int], independent: bool = False, reusable: bool = False) -> Span:
    return Span(np.array(tokens, dtype=np.int32), independent, reusable)


def make_workload(requests: list[tuple[Span, ...]]) -> Workload:
    built = tuple(Request(i, i % 3, spans, output_len=i + 1) for i, spans in enumerate(requests))
    return Workload("toy", built, Provenance("measured shape", "{documents} groups, {requests} requests"))


texts = st.lists(st.integers(0, 2), min_size=0, max_size=6)
# An end mark keeps a span from being a proper prefix of another one, as real layouts do.
requests = st.lists(st.tuples(texts, texts), min_size=1, max_size=12)


def marked(prompts: list[tuple[list[int], list[int]]]) -> Workload:
    return make_workload(
        [
            (make_span([*document, FIRST_END], True, True), make_span([*question, SECOND_END]))
            for document, question in prompts
        ]
    )


@settings(max_examples=80, deadline=None)
@given(requests)
def test_round_trip_keeps_all_pairwise_prefixes_and_span_equalities(prompts):
    real = marked(prompts)
    modelled = select(measure(real).corpus(), Selection())
    for first, second in combinations(range(len(prompts)), 2):
        real_one, real_other = real.requests[first], real.requests[second]
        made_one, made_other = modelled.requests[first], modelled.requests[second]
        assert shared_length(made_one.tokens, made_other.tokens) == shared_length(real_one.tokens, real_other.tokens)
        for i in range(2):
            for j in range(2):
                real_equal = np.array_equal(real_one.spans[i].tokens, real_other.spans[j].tokens)
                assert np.array_equal(made_one.spans[i].tokens, made_other.spans[j].tokens) == real_equal


@settings(max_examples=50, deadline=None)
@given(requests)
def test_round_trip_keeps_lengths_flags_groups_and_outputs(prompts):
    real = marked(prompts)
    modelled = select(measure(real).corpus(), Selection())
    for first, second in zip(real.requests, modelled.requests, strict=True):
        assert [len(span.tokens) for span in first.spans] == [len(span.tokens) for span in second.spans]
        assert first.boundaries == second.boundaries
        assert [span.independent for span in first.spans] == [span.independent for span in second.spans]
        assert (first.id, first.group_id, first.output_len) == (second.id, second.group_id, second.output_len)


@settings(max_examples=50, deadline=None)
@given(requests, st.data())
def test_a_token_id_does_not_depend_on_what_else_is_wanted(prompts, data):
    shape = measure(marked(prompts))
    everything = expand(shape, dict(enumerate(shape.lengths.tolist())))
    span = data.draw(st.integers(0, len(shape.lengths) - 1))
    length = data.draw(st.integers(1, int(shape.lengths[span])))
    alone = expand(shape, {span: length})
    assert list(alone) == [span]
    assert alone[span].tolist() == everything[span][:length].tolist()


def test_spans_are_in_lexicographic_order_with_their_shared_lengths():
    shape = measure(make_workload([(make_span([5, 1, 9]),), (make_span([300, 1]),), (make_span([5, 1, 7]),)]))
    assert shape.lengths.tolist() == [3, 3, 2]
    assert shape.lcps.tolist() == [0, 2, 0]
    assert shape.requests() == [(1,), (2,), (0,)]


def test_equal_tokens_with_other_flags_are_two_spans_that_expand_alike():
    shape = measure(make_workload([(make_span([1, 2]),), (make_span([1, 2], reusable=True),)]))
    assert shape.flags.tolist() == [0, 2]
    assert shape.lcps.tolist() == [0, 2]
    tokens = expand(shape, {0: 2, 1: 2})
    assert tokens[0].tolist() == tokens[1].tolist()


def test_a_span_that_continues_another_ones_text_is_refused():
    split = make_workload([(make_span([1, 2]), make_span([3, 4])), (make_span([1, 2, 3]), make_span([9]))])
    with pytest.raises(ValueError, match=r"the shape of toy keeps 2 of the 3 tokens that prompts 0 and 1 share"):
        measure(split)


def test_saved_shape_is_identical_and_its_bytes_are_deterministic(tmp_path: Path):
    shape = measure(marked([([1, 2], [0]), ([1], [2]), ([1, 2], [1])]), inputs={"a": "b"})
    first, second = save(shape, tmp_path / "one.npz"), save(shape, tmp_path / "other.npz")
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.npz", "other.npz"]
    again = load(first)
    assert again.meta == shape.meta
    for name in ARRAYS:
        assert getattr(again, name).tolist() == getattr(shape, name).tolist(), name


def test_a_shape_of_another_format_is_refused(tmp_path: Path):
    path = save(measure(marked([([1], [2])]), format=99), tmp_path / "new.npz")
    with pytest.raises(ValueError, match="has format 99; expected 1"):
        load(path)


COMMITTED = {
    "quality": ("measured shape: 48 QuALITY articles, 863 questions", 5_555_598),
    "system_prompts": ("measured shape: 122 system prompts, 3660 user queries", 15_090_321),
}


@pytest.mark.parametrize("kind", COMMITTED)
def test_committed_shape_expands_to_its_published_size(kind: str):
    line, tokens = COMMITTED[kind]
    workload = load_workload(kind)
    assert workload.provenance.line().startswith(line)
    assert sum(request.num_tokens for request in workload.requests) == tokens
    assert [request.id for request in workload.requests] == list(range(len(workload.requests)))


def test_committed_narrativeqa_says_that_it_is_modelled():
    workload = load_workload("narrativeqa", documents=2, max_prompt_tokens=4096)
    assert workload.provenance.line() == (
        "modelled: 2 NarrativeQA stories by published word count at 1.331 tokens per word (QuALITY articles), "
        "60 FairytaleQA questions and answer lengths, qwen2 tokenizer; 2 documents cut"
    )
    longest = [max(r.num_tokens for r in workload.requests if r.group_id == group) for group in (0, 1)]
    assert longest == [4096, 4096]


def test_no_folder_of_any_machine_is_in_a_shape():
    for path in SHAPES.glob("*.npz"):
        meta = load(path).meta
        assert not [name for name in meta["inputs"] if "/" in name or "\\" in name]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lengths": np.array([1.5])}, "cannot be read; expected a file that make_shape has written"),
        ({"lcps": np.array([0])}, r"has lcps=\[0\]; expected \d+ numbers, not 1"),
        ({"request_spans": np.array([-1])}, r"has request_spans=\[-1\]; expected numbers from 0 to"),
        ({"arrivals_s": np.array([1])}, r"has arrivals_s=\[1\]; expected \d+ numbers from 0 to"),
        ({"meta": []}, "has format None; expected 1"),
        ({"meta": {"format": 1}}, "has name=None; expected a text"),
        (
            {"meta": {"name": "a", "kind": "b", "detail": "c", "format": 1, "joints": 3}},
            "has joints=3; expected numbers",
        ),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(tmp_path: Path, change: dict, problem: str):
    with np.load(SHAPES / "quality.npz") as archive:
        arrays = dict(archive)
    if "meta" in change:
        change = {"meta": np.frombuffer(json.dumps(change["meta"]).encode(), np.uint8)}
    np.savez(tmp_path / "bad.npz", **(arrays | change))
    with pytest.raises(ValueError, match=rf"^shape .*bad.npz {problem}"):
        load(tmp_path / "bad.npz")


def test_committed_quality_shape_equals_a_fresh_measure(tmp_path: Path, shared: Path):
    text, tokenizer = shared / "quality" / "quality_dev_matched.jsonl", shared / "tokenizers" / "qwen2"
    check_equals_committed(make_shape("quality", text, tokenizer, tmp_path), "quality")


@pytest.mark.slow
def test_committed_system_prompt_shape_equals_a_fresh_measure(tmp_path: Path, shared: Path):
    table, queries = shared / "system_prompts" / "system_prompts_qwen2.parquet", shared / "user_queries"
    fresh = make_shape(
        "system_prompts", table, shared / "tokenizers" / "qwen2", tmp_path, queries_path=queries / "user_queries.jsonl"
    )
    check_equals_committed(fresh, "system_prompts")


@pytest.mark.slow
def test_committed_narrativeqa_shape_equals_a_fresh_model(tmp_path: Path, shared: Path):
    fresh = make_shape(
        "narrativeqa",
        shared / "narrativeqa" / "documents.csv",
        shared / "tokenizers" / "qwen2",
        tmp_path,
        questions_path=shared / "fairytaleqa" / "fairytaleqa.jsonl",
        words_path=shared / "quality" / "quality_dev_matched.jsonl",
    )
    check_equals_committed(fresh, "narrativeqa")


def test_a_shape_loads_without_the_text_libraries():
    code = (
        "import sys; from spanlab.workloads import WORKLOADS, load_workload; "
        "load_workload(WORKLOADS.of('workload', {'kind': 'quality'})); "
        "print(sorted({'datasets', 'tokenizers', 'pyarrow', 'torch', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_selection_of_the_real_text_equals_selection_of_its_shape(tmp_path: Path, shared: Path):
    chosen = {"documents": 5, "questions_per_document": 4, "max_prompt_tokens": 6000}
    text, tokenizer = shared / "quality" / "quality_dev_matched.jsonl", shared / "tokenizers" / "qwen2"
    real = load_workload("quality", "local", path=text, tokenizer=tokenizer, cache_dir=tmp_path, **chosen)
    modelled = load_workload("quality", "shape", **chosen)
    assert_same_structure(real, modelled)


def assert_same_structure(real: Workload, modelled: Workload) -> None:
    assert len(real.requests) == len(modelled.requests)
    assert real.provenance.documents_cut == modelled.provenance.documents_cut
    assert real.provenance.documents_dropped == modelled.provenance.documents_dropped
    for first, second in zip(real.requests, modelled.requests, strict=True):
        assert first.boundaries == second.boundaries
        for key in ("group_id", "num_tokens", "output_len"):
            assert getattr(first, key) == getattr(second, key)
    check_equal_prefixes(real.requests, modelled.requests)
