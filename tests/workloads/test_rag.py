"""RAG requests: real passages and questions, modelled retrieval."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.build import build_workload
from spanlab.workloads import WORKLOADS, Rag, RagPulse, Workload, make_shape
from spanlab.workloads.load import Popularity
from spanlab.workloads.rag import (
    RagPulseWorkload,
    RagWorkload,
    draw_requests,
    fit_length,
    popularity,
    with_passage_length,
)
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.text import split_passages
from spanlab.workloads.workload import Corpus, EncodedText, Row, shared_length

from .factories import check_equals_committed, load_workload, token_lists, words_of

SYSTEM, TURN = [1, 2, 3, 4], [8, 9]


def make_source(sizes: list[int], questions: int = 2) -> Corpus:
    """Documents of `sizes` passages: passage i is i + 1 tokens that begin with 1000 (i + 1), questions likewise."""
    spans, rows = [SYSTEM, TURN], []
    flags = [(False, True), (False, False)]
    passage = 0
    for document, size in enumerate(sizes):
        passage_spans = range(len(spans), len(spans) + size)
        spans += [[1000 * (passage + i + 1), *range(passage + i)] for i in range(size)]
        passage += size
        rows += [
            Row(document, (0, 1, *passage_spans, passage_spans.stop + i), 5 + i, f"answer {i}")
            for i in range(questions)
        ]
        spans += [[-1000 * document - i - 1] * 3 for i in range(questions)]
        flags += [(True, False)] * size + [(False, False)] * questions
    independent, reusable = (np.array(column) for column in zip(*flags, strict=True))
    arrays = tuple(np.array(span, dtype=np.int32) for span in spans)
    return EncodedText(arrays, independent, reusable, tuple(rows)).corpus("rag", "measured shape", "toys, by hand")


def draw(sizes: list[int], questions: int = 2, selection: Selection | None = None, **options) -> Workload:
    drawn = draw_requests(make_source(sizes, questions), selection or Selection(), Rag(**options))
    return select(drawn, Selection())


def passage_numbers(workload: Workload) -> list[list[int]]:
    """Passage numbers of each request in prompt order."""
    return [[int(span.tokens[0]) // 1000 - 1 for span in request.spans[1:-1]] for request in workload.requests]


def question_numbers(workload: Workload) -> list[int]:
    return [int(request.spans[-1].tokens[0]) for request in workload.requests]


def test_a_request_is_head_passages_question():
    workload = draw([4, 3, 5], k=3)
    assert len(workload.requests) == 6
    for request, passages in zip(workload.requests, passage_numbers(workload), strict=True):
        head, *middle, question = request.spans
        assert head.tokens.tolist() == SYSTEM + TURN
        assert len(set(passages)) == 3
        assert [len(span.tokens) for span in middle] == [number + 1 for number in passages]
        assert question.tokens.tolist() == [-1000 * request.group_id - request.id % 2 - 1] * 3
        assert [span.independent for span in request.spans] == [False, True, True, True, False]
        assert request.boundaries == (6,)
        assert (request.output_len, request.answer) == (5 + request.id % 2, f"answer {request.id % 2}")
        assert {str(span.tokens.dtype) for span in request.spans} == {"int32"}
    assert [request.group_id for request in workload.requests] == [0, 0, 1, 1, 2, 2]


def test_equal_spans_are_one_object():
    workload = draw([4, 3], k=3, requests=50)
    spans = [span for request in workload.requests for span in request.spans]
    assert len({id(span) for span in spans}) == len({span.tokens.tobytes() for span in spans}) < len(spans)


def test_the_seed_decides_everything_and_more_requests_change_no_earlier_one():
    def prompts(**options) -> list[list[int]]:
        return token_lists(draw([9, 8, 7], k=4, **options))

    assert prompts(requests=30, seed=3) == prompts(requests=30, seed=3)
    assert prompts(requests=30, seed=3) != prompts(requests=30, seed=4)
    assert prompts(requests=30, seed=3)[:10] == prompts(requests=10, seed=3)


def test_orders_change_the_order_and_nothing_else():
    by_order = {order: draw([9, 8, 7], k=4, requests=40, order=order) for order in ("shuffled", "ranked", "fixed")}
    assert len({tuple(question_numbers(workload)) for workload in by_order.values()}) == 1
    sets = [[sorted(passages) for passages in passage_numbers(workload)] for workload in by_order.values()]
    assert sets[0] == sets[1] == sets[2] == passage_numbers(by_order["fixed"])
    for order, workload in by_order.items():
        earlier: dict[int, set[tuple[int, ...]]] = {}
        for question, passages in zip(question_numbers(workload), passage_numbers(workload), strict=True):
            earlier.setdefault(question, set()).add(tuple(passages))
        assert (max(map(len, earlier.values())) > 1) == (order == "shuffled")


def test_a_question_asked_again_finds_the_same_passages():
    workload = draw([9, 8, 7], k=4, requests=60)
    sets: dict[int, set[tuple[int, ...]]] = {}
    for question, passages in zip(question_numbers(workload), passage_numbers(workload), strict=True):
        sets.setdefault(question, set()).add(tuple(sorted(passages)))
    assert len(sets) <= 6
    assert {len(passages) for passages in sets.values()} == {1}


def test_documents_are_asked_about_as_often_as_their_zipf_shares_say():
    n, sizes = 20_000, [5, 5, 5, 5, 5, 5]
    workload = draw(sizes, k=1, requests=n, zipf=1.2, seed=7)
    shares = popularity(sizes, 1.2, 1.0, np.random.default_rng([7, 0])).documents
    assert sorted(shares, reverse=True)[0] / sorted(shares)[0] == pytest.approx(6**1.2)
    documents = [-(number + 1) // 1000 for number in question_numbers(workload)]
    counts = np.bincount(documents, minlength=6)
    assert (np.abs(counts - n * shares) / np.sqrt(n * shares * (1 - shares))).max() < 4
    halves = Counter(question_numbers(workload))
    for document in range(6):
        first, second = (halves[-1000 * document - i - 1] for i in range(2))
        assert abs(first - second) < 4 * np.sqrt(first + second)


def test_best_passages_are_as_frequent_as_their_weights_say():
    """Many questions, each of which draws once: the first-ranked passage of each follows the mixture exactly."""
    sizes, questions = [4, 3], 6000
    workload = draw(sizes, questions, k=2, order="ranked", noise=0.3, zipf=0.5, passage_zipf=1.5, seed=11)
    shares = popularity(sizes, 0.5, 1.5, np.random.default_rng([11, 0]))
    best = np.array([passages[0] for passages in passage_numbers(workload)]).reshape(2, questions)
    for document in range(2):
        chances = shares.weights(document, 0.3)
        counts = np.bincount(best[document], minlength=7)
        assert (np.abs(counts - questions * chances) / np.sqrt(questions * chances * (1 - chances))).max() < 4


def test_without_noise_a_question_finds_its_own_document_only():
    workload = draw([4, 3, 5], k=3, noise=0.0)
    for request, passages in zip(workload.requests, passage_numbers(workload), strict=True):
        document = [range(4), range(4, 7), range(7, 12)][request.group_id]
        assert set(passages) <= set(document)


@pytest.mark.parametrize(("length", "head"), [(3, [1]), (4, [1, 2]), (6, SYSTEM), (11, [1, 2, 3, 4, 2, 3, 4, 2, 3])])
def test_the_head_has_exactly_the_length_that_was_asked_for(length: int, head: list[int]):
    request = draw([4], k=2, system_tokens=length).requests[0]
    assert request.spans[0].tokens.tolist() == head + TURN
    assert request.boundaries == (length,)


def test_documents_and_questions_are_selected_before_anything_is_drawn():
    workload = draw([4, 3, 5], 3, Selection(documents=2, questions_per_document=2), k=3, noise=1.0, requests=40)
    assert {passage for passages in passage_numbers(workload) for passage in passages} <= set(range(7))
    assert set(question_numbers(workload)) == {-1, -2, -1001, -1002}
    assert "7 passages and 4 questions of 2 toys, by hand" in workload.provenance.detail


def test_provenance_says_that_retrieval_is_modelled():
    line = draw([4, 3], k=3, requests=9, order="fixed", noise=0.25, seed=5).provenance.line()
    assert line == (
        "modelled: retrieval over measured passage lengths: 9 requests of 3 passages in fixed order, document Zipf 1, "
        "passage Zipf 1, noise 0.25, seed 5; 7 passages and 4 questions of 2 toys, by hand"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"k": 0}, "workload.rag.k=0: expected a number above zero"),
        ({"requests": 0}, "workload.rag.requests=0: expected a number above zero"),
        ({"system_tokens": 0}, "workload.rag.system_tokens=0: expected a number above zero"),
        ({"passage_tokens": 0}, "workload.rag.passage_tokens=0: expected a number above zero"),
        ({"zipf": -1.0}, "workload.rag.zipf=-1.0; expected an exponent from 0 to 20"),
        ({"passage_zipf": float("nan")}, "workload.rag.passage_zipf=nan; expected an exponent from 0 to 20"),
        ({"zipf": 1000.0}, "workload.rag.zipf=1000.0; expected an exponent from 0 to 20"),
        ({"noise": 1.5}, "workload.rag.noise=1.5: expected a share from 0 to 1"),
        ({"order": "sorted"}, "workload.rag.order=sorted: expected one of shuffled, ranked, fixed"),
        ({"seed": -1}, "workload.rag.seed=-1: expected zero or more"),
        ({"k": 13}, "workload.rag.k=13; expected at most 12, the passages of the corpus"),
        (
            {"k": 4, "noise": 0.0},
            "workload.rag.k=4; expected at most 3, the passages of its shortest document, as noise=0",
        ),
        (
            {"system_tokens": 2},
            "workload.rag.system_tokens=2; expected at least 3, because 2 tokens open the user's turn",
        ),
    ],
)
def test_a_senseless_model_is_refused(options: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        draw([4, 3, 5], **options)


def test_the_steepest_popularity_still_finds_every_passage():
    assert sorted(passage_numbers(draw([400], 1, k=400, zipf=20, passage_zipf=20))[0]) == list(range(400))


def test_a_length_limit_is_refused():
    with pytest.raises(ValueError, match=r"^workload.max_prompt_tokens=900 with workload.kind=rag: expected"):
        load_workload("rag", max_prompt_tokens=900)


@given(st.text(alphabet="ab .!?\n\"'", max_size=300), st.integers(1, 12))
def test_cutting_loses_no_word_and_no_passage_is_too_long(text: str, words: int):
    passages = split_passages(text, words)
    assert " ".join(passages).split() == text.split()
    assert all(1 <= len(passage.split()) <= words for passage in passages)


def test_cutting_keeps_sentences_whole():
    text = 'One two three. "Four five!" he said.\n\nSix? Seven eight nine ten eleven twelve thirteen.'
    assert split_passages(text, 5) == [
        'One two three. "Four five!"',
        "he said.\n\nSix?",
        "Seven eight nine ten eleven",
        "twelve thirteen.",
    ]


def test_passages_of_one_length_are_the_same_passages():
    source = with_passage_length(make_source([2, 3]), 4)
    workload = select(draw_requests(source, Selection(), Rag(k=3, noise=0.5)), Selection())
    plain = draw([2, 3], k=3, noise=0.5)
    assert passage_numbers(workload) == passage_numbers(plain)
    for request, other in zip(workload.requests, plain.requests, strict=True):
        ends = [span.tokens.tolist() for span in (request.spans[0], request.spans[-1])]
        assert ends == [span.tokens.tolist() for span in (other.spans[0], other.spans[-1])]
        for span, original in zip(request.spans[1:-1], other.spans[1:-1], strict=True):
            assert span.tokens.tolist() == fit_length(original.tokens, 4).tolist()
    assert "each passage cut or repeated to 4 tokens" in workload.provenance.detail


def test_one_length_of_passages_fits_no_text(quality_files: dict[str, Path]):
    sentence = "workload.rag.passage_tokens=9 with workload.source=local: expected null"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        load_workload("rag", "local", path=quality_files["path"], rag=Rag(passage_tokens=9))


def test_local_text_is_laid_out_in_chat_turns(quality_files: dict[str, Path], make_tokenizer, quality_rows):
    extra = "You answer questions from the passages that a search found Reply in few words say so if they do not tell"
    tokenizer = make_tokenizer(json.dumps(quality_rows), f"{extra} Passages Question ; Answer assistant", name="rag")
    workload = load_workload("rag", "local", path=quality_files["path"], tokenizer=tokenizer, rag=Rag(k=2))
    request = workload.requests[0]
    spans = [words_of(span.tokens, tokenizer) for span in request.spans]
    assert re.fullmatch(
        r"<\|im_start\|> system You answer .* tell \. <\|im_end\|> <\|im_start\|> user Passages :", spans[0]
    )
    assert {re.sub(r"word\d+", "", span).split()[0] for span in spans[1:3]} < {"alpha", "beta", "gamma"}
    assert spans[3] == "Question : why alpha w1 0 ? <|im_end|> <|im_start|> assistant Answer :"
    assert request.answer == "pickaalphaw10"
    assert "retrieval over local text: 12 requests of 2 passages" in workload.provenance.detail
    assert "3 passages and 12 questions of 3 QuALITY articles, toy.jsonl, rag tokenizer" in workload.provenance.detail


def test_the_shape_serves_exactly_what_the_text_would(tmp_path: Path, shared: Path):
    text, tokenizer = shared / "quality" / "quality_dev_matched.jsonl", shared / "tokenizers" / "qwen2"
    check_equals_committed(make_shape("rag", text, tokenizer, tmp_path, cache_dir=tmp_path), "rag")
    options = Rag(k=5, requests=300, system_tokens=700)
    real = load_workload("rag", "local", path=text, tokenizer=tokenizer, cache_dir=tmp_path, documents=30, rag=options)
    modelled = load_workload("rag", documents=30, rag=options)
    assert_same_structure(real, modelled)


def assert_same_structure(real: Workload, modelled: Workload) -> None:
    numbers: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
    for first, second in zip(real.requests, modelled.requests, strict=True):
        assert [len(span.tokens) for span in first.spans] == [len(span.tokens) for span in second.spans]
        assert [span.independent for span in first.spans] == [span.independent for span in second.spans]
        for key in ("boundaries", "group_id", "output_len"):
            assert getattr(first, key) == getattr(second, key)
        same = [
            [span_numbers.setdefault(span.tokens.tobytes(), len(span_numbers)) for span in request.spans]
            for span_numbers, request in zip(numbers, (first, second), strict=True)
        ]
        assert same[0] == same[1]
    order = sorted(range(len(real.requests)), key=lambda i: real.requests[i].tokens.astype(">i4").tobytes())
    for i, j in pairwise(order):
        expected = shared_length(real.requests[i].tokens, real.requests[j].tokens)
        assert shared_length(modelled.requests[i].tokens, modelled.requests[j].tokens) == expected


def test_the_committed_shape_has_its_published_size():
    workload = load_workload("rag", rag=Rag(requests=1000))
    assert workload.provenance.line() == (
        "modelled: retrieval over measured passage lengths: 1000 requests of 6 passages in shuffled order, document "
        "Zipf 1, passage Zipf 1, noise 0.2, seed 0; 1208 passages and 863 questions of 48 QuALITY articles, "
        "quality_dev_matched.jsonl, qwen2 tokenizer"
    )
    spans = {id(s): s for request in workload.requests for s in request.spans if s.independent}
    assert len(spans) <= 1208
    assert {request.boundaries for request in workload.requests} == {(36,)}


# -- Settings of the two RAG workloads. ---


def test_rag_settings_reach_the_workload():
    rag = Rag(k=3, requests=7, zipf=0.5, passage_zipf=0.25, noise=0.1, order="ranked", system_tokens=99, seed=4)
    workload = build_workload(RagWorkload(documents=5, output_tokens=9, rag=rag), "unused")
    assert [len(request.spans) for request in workload.requests] == [5] * 7
    assert {(request.boundaries, request.output_len) for request in workload.requests} == {((99,), 9)}
    detail = "7 requests of 3 passages in ranked order, document Zipf 0.5, passage Zipf 0.25, noise 0.1, seed 4; "
    assert detail in workload.provenance.line()


def test_ragpulse_settings_reach_the_workload():
    settings = RagPulse(requests=5, rate_rps=2.0, independent="all")
    workload = build_workload(RagPulseWorkload(ragpulse=settings), "unused")
    assert len(workload.requests) == 5
    assert workload.requests[-1].arrived_at == 2 * 10**9
    assert "gaps stretched to 2 requests a second, every component independent" in workload.provenance.line()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "rag", "rag": None}, "workload.kind=rag needs workload.rag: expected its keys (Rag)"),
        (
            {"kind": "quality", "ragpulse": {"requests": 3}},
            "workload.ragpulse.requests=3 with workload.kind=quality: expected workload.ragpulse.requests=null, "
            "for it goes with ragpulse",
        ),
        ({"kind": "rag", "rag": {"k": "six"}}, "workload.rag.k=six: expected a whole number"),
        ({"kind": "rag", "rag": 3}, "workload.rag=3: expected its keys, k, requests, zipf"),
        ({"kind": "rag", "rag": {"bogus": 3}}, "workload.rag.bogus: no such key; expected one of k, requests"),
        (
            {"kind": "rag", "rag": Rag(), "popularity": Popularity(requests=3)},
            "workload.popularity.requests=3 with workload.kind=rag: expected workload.popularity.requests=null, for it "
            "goes with alias_questions, chat_sessions, conversation, forked_sequence, log, narrativeqa, quality, "
            "queries, repeated_documents, synthetic, system_prompts, tokenised (did you mean workload.rag.requests?)",
        ),
        (
            {"kind": "ragpulse", "ragpulse": RagPulse(), "popularity": Popularity(requests=3)},
            "workload.popularity.requests=3 with workload.kind=ragpulse: expected",
        ),
        (
            {"kind": "ragpulse", "ragpulse": RagPulse(), "source": "local", "path": "x", "tokenizer": "y"},
            "workload.tokenizer=y with workload.kind=ragpulse: expected workload.tokenizer=null",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        WORKLOADS.of("workload", options)
