"""Selection and length limits: the same rules for text and shape, with counts."""

from pathlib import Path

import pytest

from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import load, measure, save

from .factories import load_workload, token_lists


@pytest.fixture
def corpora(quality_files: dict[str, Path], tmp_path: Path):
    """The toy QuALITY as a text corpus and as the corpus of its saved shape."""
    from spanlab.workloads.reading import local_quality

    text = local_quality(quality_files["path"], quality_files["tokenizer"])
    everything = select(text, Selection(unknown_output=0))
    shape = load(save(measure(everything, detail=text.detail), tmp_path / "toy.npz"))
    return text, shape.corpus()


def lengths(workload) -> list[tuple[int, list[int], int]]:
    return [(r.group_id, [len(span.tokens) for span in r.spans], r.output_len) for r in workload.requests]


def test_two_writers_are_grouped_under_one_article(corpora):
    text, _ = corpora
    workload = select(text, Selection())
    assert [r.group_id for r in workload.requests] == [0] * 4 + [1] * 4 + [2] * 4
    assert [len(r.spans[1].tokens) for r in workload.requests[::4]] == [20, 60, 30]
    assert workload.provenance.detail == "3 QuALITY articles, 12 questions, toy.jsonl, toy tokenizer"


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"documents": 2},
        {"questions_per_document": 3},
        {"documents": 1, "questions_per_document": 1, "output_tokens": 7},
        {"max_prompt_tokens": 90},
        {"max_prompt_tokens": 90, "too_long": "drop"},
        {"max_prompt_tokens": 90, "too_long": "drop", "documents": 2},
    ],
)
def test_text_and_shape_select_the_same(corpora, chosen: dict):
    text, shape = (select(corpus, Selection(**chosen)) for corpus in corpora)
    assert lengths(text) == lengths(shape)
    assert text.provenance == shape.provenance


def test_first_documents_and_first_questions_are_taken(corpora):
    text, _ = corpora
    all_of_it, some = select(text, Selection()), select(text, Selection(documents=2, questions_per_document=3))
    expected = [all_of_it.requests[i].tokens.tolist() for i in (0, 1, 2, 4, 5, 6)]
    assert token_lists(some) == expected
    assert [r.id for r in some.requests] == [0, 1, 2, 3, 4, 5]


def test_cut_shortens_the_document_from_its_end_and_never_the_question(corpora):
    text, _ = corpora
    uncut = select(text, Selection())
    limit = uncut.requests[0].num_tokens + 15
    cut = select(text, Selection(max_prompt_tokens=limit))
    assert (cut.provenance.documents_cut, cut.provenance.documents_dropped) == (1, 0)
    assert [len(r.spans[1].tokens) for r in cut.requests] == [20] * 4 + [35] * 4 + [30] * 4
    for whole, shortened in zip(uncut.requests, cut.requests, strict=True):
        before, after = ([span.tokens.tolist() for span in request.spans] for request in (whole, shortened))
        assert after == [before[0], before[1][: len(after[1])], before[2]]
    assert max(r.num_tokens for r in cut.requests) == limit


def test_drop_removes_the_document_with_all_its_questions(corpora):
    text, _ = corpora
    limit = select(text, Selection()).requests[0].num_tokens + 15
    selected = select(text, Selection(max_prompt_tokens=limit, too_long="drop"))
    assert (selected.provenance.documents_cut, selected.provenance.documents_dropped) == (0, 1)
    assert [(r.id, r.group_id, len(r.spans[1].tokens)) for r in selected.requests] == [
        *((i, 0, 20) for i in range(4)),
        *((i, 1, 30) for i in range(4, 8)),
    ]
    assert selected.provenance.line().endswith(
        "2 QuALITY articles, 8 questions, toy.jsonl, toy tokenizer; 1 document dropped"
    )


def test_documents_counts_those_that_fit(corpora):
    text, _ = corpora
    limit = select(text, Selection()).requests[0].num_tokens + 15
    selected = select(text, Selection(documents=2, max_prompt_tokens=limit, too_long="drop"))
    assert [len(r.spans[1].tokens) for r in selected.requests] == [20] * 4 + [30] * 4


def test_a_document_of_which_nothing_could_remain_is_dropped(corpora):
    text, _ = corpora
    limit = select(text, Selection()).requests[0].num_tokens - 20
    assert {len(r.spans[1].tokens) for r in select(text, Selection(max_prompt_tokens=limit + 1)).requests} == {1}
    with pytest.raises(ValueError, match=rf"workload.max_prompt_tokens={limit} leaves nothing of quality; expected"):
        select(text, Selection(max_prompt_tokens=limit))


def test_groups_that_share_a_document_each_get_their_own_cut(tmp_path: Path, make_tokenizer):
    """Equal system prompts are one span of a shape, yet their longest queries differ."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.md").write_text("be kind and brief to everyone who asks", encoding="utf-8")
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"query": "hi"}\n{"query": "hi there my old friend of many years"}\n', encoding="utf-8")
    from spanlab.workloads.reading import local_system_prompts

    tokenizer = make_tokenizer("be kind and brief to everyone who asks hi there my old friend of many years")
    text = local_system_prompts(folder, queries, tokenizer, queries_per_prompt=1)
    shape = measure(select(text, Selection(unknown_output=0)), detail=text.detail).corpus()
    for limit in (14, 16, 18, 20):
        first, second = (select(corpus, Selection(max_prompt_tokens=limit)) for corpus in (text, shape))
        assert lengths(first) == lengths(second)
        assert first.provenance == second.provenance


def test_more_documents_than_there_are_is_refused(corpora):
    for corpus in corpora:
        assert len(select(corpus, Selection(documents=3)).requests) == 12
        with pytest.raises(ValueError, match=r"^workload.documents=4; expected at most 3, the documents of quality$"):
            select(corpus, Selection(documents=4))
        fitting = Selection(documents=3, too_long="drop", max_prompt_tokens=90)
        with pytest.raises(
            ValueError,
            match=r"^workload.documents=3; expected at most 2, the documents of quality that fit "
            r"workload.max_prompt_tokens$",
        ):
            select(corpus, fitting)


@pytest.mark.parametrize(
    ("kind", "held"), [("quality", 48), ("narrativeqa", 1572), ("system_prompts", 122), ("ragpulse", 3990), ("rag", 48)]
)
def test_every_committed_shape_counts_its_documents(kind: str, held: int):
    with pytest.raises(ValueError, match=f"^workload.documents=9999; expected at most {held}, the documents of {kind}"):
        load_workload(kind, documents=9999)


@pytest.mark.parametrize("key", ["documents", "questions_per_document", "max_prompt_tokens", "output_tokens"])
def test_a_number_below_one_is_refused(key: str):
    with pytest.raises(ValueError, match=rf"workload.{key}=0: expected a number above zero"):
        load_workload("quality", **{key: 0})


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"workload.too_long=shrink: expected one of cut, drop"):
        load_workload("quality", too_long="shrink")


def test_unknown_output_gets_the_default_and_output_tokens_overrides():
    assert {r.output_len for r in load_workload("system_prompts", documents=1).requests} == {64}
    assert {r.output_len for r in load_workload("quality", documents=1, output_tokens=5).requests} == {5}
