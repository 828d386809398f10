"""Prompts with several documents or with the question first: the position of every token."""

import re
from pathlib import Path

import numpy as np
import pytest

from spanlab.workloads import Workload, make_shape
from spanlab.workloads.selection import Arrangement, arranged
from spanlab.workloads.workload import Joints

from ..support.products import in_turn
from .conftest import QUALITY_ROWS
from .factories import check_equal_prefixes, decoded, load_workload, token_lists

FEW = {"documents": 5, "questions_per_document": 4, "max_prompt_tokens": 1500}
PLAIN = FEW | {"max_prompt_tokens": 400}
JOINTS = Joints(np.array([91, 92], dtype=np.int32), question_overlap=1, answer_overlap=1, answer=3)
KINDS = ("quality", "narrativeqa", "system_prompts")


def ids(*spans) -> list[int]:
    """Concatenated token ids of spans."""
    return [token for span in spans for token in span.tokens.tolist()]


def parts_of(workload: Workload) -> list[tuple[list[int], list[int], list[int]]]:
    """Opening, document and question of each prompt."""
    return [(ids(*r.spans[:-2]), ids(r.spans[-2]), ids(r.spans[-1])) for r in workload.requests]


@pytest.mark.parametrize(("order", "kind"), in_turn(["shuffled", "fixed", "own_first", "own_last"], KINDS))
def test_a_prompt_is_opening_documents_and_question(kind: str, order: str):
    plain = load_workload(kind, **PLAIN)
    result = arranged(plain, Arrangement(3, order), JOINTS)
    parts = parts_of(plain)
    texts = list(dict.fromkeys(tuple(document) for _, document, _ in parts))
    for request, (opening, own, question) in zip(result.requests, parts, strict=True):
        before = len(request.spans) - 4
        chosen = [tuple(ids(span)[:-2]) for span in request.spans[before:-1]]
        assert ids(*request.spans[:before]) == opening
        assert all(ids(span)[-2:] == [91, 92] for span in request.spans[before:-1])
        assert ids(request.spans[-1]) == question[1:]
        numbers = [texts.index(text) for text in chosen]
        assert len(set(numbers)) == 3
        index = chosen.index(tuple(own))
        assert {"own_first": index == 0, "own_last": index == 2, "fixed": numbers == sorted(numbers)}.get(order, True)
        assert all(span.independent for span in request.spans[before:-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("independent", [True, False])
def test_documents_are_marked_and_tokens_stay(kind: str, independent: bool):
    plain = load_workload(kind, **PLAIN)
    marked = load_workload(kind, **PLAIN, documents_independent=independent)
    for before, request in zip(plain.requests, marked.requests, strict=True):
        assert request.tokens.tolist() == before.tokens.tolist()
        assert [span.independent for span in request.spans if span.reusable] == [independent]
        assert not any(span.independent for span in request.spans if not span.reusable)


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("rag", {}, r"documents_independent=true with workload\.kind=rag: expected .*=null, for it goes with narr"),
        ("quality", {"documents_per_prompt": 2}, r"documents_independent=true with .*documents_per_prompt=2: expected"),
        ("queries", {"path": "x"}, r"documents_independent=true with workload\.kind=queries"),
    ],
)
def test_documents_that_cannot_be_marked_are_refused(kind: str, more: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        load_workload(kind, documents_independent=True, **more)


def test_another_order_leaves_the_documents_of_a_prompt():
    plain = load_workload("quality", **PLAIN)
    orders = [arranged(plain, Arrangement(3, order), JOINTS).requests for order in ("fixed", "own_last", "shuffled")]
    sets = [[{span.tokens.tobytes() for span in request.spans[1:-1]} for request in requests] for requests in orders]
    assert sets[0] == sets[1] == sets[2]
    assert len({tuple(ids(*request.spans[1:-1])) for request in orders[0]}) > 1
    assert [request.tokens.tobytes() for request in orders[1]] != [request.tokens.tobytes() for request in orders[2]]


def test_every_document_of_the_workload_is_drawn():
    requests = load_workload("quality", **FEW, documents_per_prompt=2).requests
    pairs = {frozenset(span.tokens.tobytes() for span in request.spans[1:-1]) for request in requests}
    assert {len(pair) for pair in pairs} == {2}
    assert len(frozenset.union(*pairs)) == 5
    assert len(pairs) > 5


@pytest.mark.parametrize("count", [1, 2])
def test_a_question_before_its_documents_leaves_the_answer_open(count: int):
    plain = load_workload("quality", **PLAIN)
    result = arranged(plain, Arrangement(count, question="before"), JOINTS)
    for request, (opening, own, question) in zip(result.requests, parts_of(plain), strict=True):
        first, question_span, *documents, answer = request.spans
        assert ids(first) == opening
        assert ids(question_span) == [*question[1:-3], 91, 92]
        assert ids(answer) == question[-2:]
        assert [*own, 91, 92] in [ids(document) for document in documents]
        assert len(documents) == count


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_documents_are_cut_alike_to_fit_the_limit(kind: str, position: str):
    keys = {"documents_per_prompt": 3, "question_position": position}
    requests = load_workload(kind, **FEW, **keys).requests
    documents = {span.tokens.tobytes() for request in requests for span in request.spans if span.reusable}
    assert len(documents) == 5
    longest = max(request.num_tokens for request in requests)
    assert 1500 - 3 * 3 - 5 <= longest <= 1500


def test_one_document_then_its_question_is_the_plain_prompt():
    workload = load_workload("quality", **FEW)
    assert arranged(workload, Arrangement(), JOINTS) is workload


def test_the_same_settings_give_the_same_prompts():
    first, second = (load_workload("quality", **FEW, documents_per_prompt=2) for _ in range(2))
    assert token_lists(first) == token_lists(second)


ARTICLES = {row["article_id"]: row["article"] for row in QUALITY_ROWS}
OPENING = "You read an article and answer a multiple-choice question about it. Reply with the line of the right option."
ASKED = "Question: why alpha w1 0 ?\nA. pickaalphaw10\nB. pickbalphaw10\nC. pickcalphaw10\nD. pickdalphaw10"


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("marks", [True, False], ids=["turn marks", "plain text"])
def test_text_of_several_documents_reads_well(make_quality, marks: bool, position: str):
    files = make_quality(marks=marks)
    keys = {"documents_per_prompt": 3, "documents_order": "fixed", "question_position": position}
    request = load_workload("quality", "local", **files, **keys).requests[0]
    text = "".join(decoded(request, files["tokenizer"]))
    documents = "".join(f"{article}\n\n" for article in ARTICLES.values())
    opening, closing = f"{OPENING}\n\nArticle:\n", "\n" if position == "after" else ""
    if marks:
        opening = f"<|im_start|>system\n{OPENING}<|im_end|>\n<|im_start|>user\nArticle:\n"
        closing = "<|im_end|>\n<|im_start|>assistant\n"
    between = f"{documents}{ASKED}" if position == "after" else f"{ASKED}\n\n{documents}"
    assert text == f"{opening}{between}{closing}Answer:"


@pytest.mark.parametrize("position", ["after", "before"])
def test_shape_and_text_arrange_the_same_tokens(make_quality, tmp_path: Path, position: str):
    files = make_quality()
    shape = make_shape("quality", files["path"], files["tokenizer"], tmp_path / "toy.npz")
    keys = {"documents_per_prompt": 2, "question_position": position, "max_prompt_tokens": 400}
    real = load_workload("quality", "local", **files, **keys).requests
    modelled = load_workload("quality", path=str(shape), **keys).requests
    for first, second in zip(real, modelled, strict=True):
        assert [len(span.tokens) for span in first.spans] == [len(span.tokens) for span in second.spans]
        assert [(s.independent, s.reusable) for s in first.spans] == [(s.independent, s.reusable) for s in second.spans]
    check_equal_prefixes(real, modelled)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"documents_per_prompt": 0}, "workload.documents_per_prompt=0: expected a whole number from 1 up"),
        ({"documents_per_prompt": 6}, "workload.documents_per_prompt=6: expected at most 5, the documents of quality"),
        (
            {"documents_order": "fixed"},
            "workload.documents_order=fixed with workload.documents_per_prompt=1: expected null",
        ),
        ({"documents_per_prompt": 2, "documents_order": "own"}, "workload.documents_order=own: expected"),
        ({"question_position": "first"}, "workload.question_position=first: expected"),
        ({"max_prompt_tokens": 3, "documents_per_prompt": 3}, "workload.max_prompt_tokens=3: expected more than 3"),
    ],
)
def test_a_bad_arrangement_gets_its_sentence(keys: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        load_workload("quality", **FEW | keys)


@pytest.mark.parametrize("kind", ["rag", "synthetic", "designed_shapes"])
@pytest.mark.parametrize(
    ("key", "value", "default"), [("documents_per_prompt", 2, 1), ("question_position", "before", "after")]
)
def test_kinds_of_other_prompts_are_not_arranged(kind: str, key: str, value: object, default: object):
    expected = f"workload.{key}={value} with workload.kind={kind}: expected workload.{key}={default}, for it goes with"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)} narrativeqa, quality, system_prompts$"):
        load_workload(kind, **{key: value})
