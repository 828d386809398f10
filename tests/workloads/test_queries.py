"""Files of structured queries: parsing, exact reuse, and the error for each invalid input."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.queries import Message, builtin_tokenizer, describe
from spanlab.queries.render import CHATML, invented_words
from spanlab.study.jobs import build_arrivals
from spanlab.workloads import WORKLOADS, Workload
from spanlab_sim.run import simulate

from ..support.notation import parse, to_sexpr
from .factories import load_workload

BUILTIN = builtin_tokenizer()
WORDS = invented_words()
SYSTEM = {"system": " ".join(WORDS[:25])}
# Of different lengths and first words, so that no sum can come out right by chance.
DOC_A, DOC_B = ({"user": " ".join(words)} for words in (WORDS[100:140], WORDS[200:270]))
ASKED, ANSWERED, ASKED_AGAIN = {"user": "why?"}, {"assistant": "because"}, {"user": "and then?"}


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def seq(*nodes: object) -> dict[str, list[object]]:
    return {"seq": list(nodes)}


def plus(*nodes: object) -> dict[str, list[object]]:
    return {"plus": list(nodes)}


def asked_texts(workload: Workload) -> list[str]:
    return [BUILTIN.decode(request.tokens) for request in workload.requests]


def contents(request: Request) -> list[tuple[list[int], bool, bool]]:
    return [(span.tokens.tolist(), span.independent, span.reusable) for span in request.spans]


def spans_with(request: Request, *messages: dict[str, str]) -> list[Span]:
    """The span of each message, looked up by its text."""
    texts = [BUILTIN.decode(span.tokens) for span in request.spans]
    return [
        request.spans[next(i for i, text in enumerate(texts) if content in text)]
        for message in messages
        for content in message.values()
    ]


def length(spans: Iterable[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def common_prefix(first: Request, second: Request) -> int:
    """Length of the longest common prefix of two prompts, token by token."""
    pairs = zip(first.tokens.tolist(), second.tokens.tolist(), strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


@pytest.fixture
def reused(tmp_path: Path):
    """Serve queries sequentially in a study; return requests and reused tokens by arm."""

    def serve(*rows: dict) -> tuple[tuple[Request, ...], dict[str, list[int]]]:
        timed = [{"arrived_s": 100 * i, "output_tokens": 1, **row} for i, row in enumerate(rows)]
        overrides = ["workload=queries", f"workload.path={lines(tmp_path / 'served.jsonl', *timed)}"]
        overrides += ["model=llama-3.1-8b", "arms=pic", "load.arms=[]", "load.rates_rps=[]", "workload.documents=null"]
        study = compose("smoke", [*overrides, "arrivals=as_given", "arrivals.rate_rps=null"])
        requests = build_workload(study.workload, "unused").requests
        arrived = build_arrivals(study, requests, 0, None)
        counts = {}
        for arm, strategy in study.arms.items():
            records: list = []
            policy = build_policy(study, strategy, 0, max(request.num_tokens for request in requests))
            simulate(arrived, policy, study.batch, build_timing(study), records.append)
            counts[arm] = [record.reused_tokens for record in sorted(records, key=lambda record: record.request_id)]
        return requests, counts

    return serve


def test_pic_reuses_reordered_documents_and_radix_does_not(reused):
    (first, second), tokens = reused(
        {"query": seq(SYSTEM, plus(DOC_A, DOC_B), ASKED)}, {"query": seq(SYSTEM, plus(DOC_B, DOC_A), ASKED_AGAIN)}
    )
    shared = length(spans_with(second, SYSTEM, DOC_A, DOC_B))
    assert tokens["pic"] == [0, shared]
    # After the system prompt, a prefix contains only the opening of a user's turn.
    opened = length(spans_with(first, SYSTEM)) + len(BUILTIN.encode("<|im_start|>user\n"))
    assert tokens["radix"] == [0, opened] == [0, common_prefix(first, second)]
    assert tokens["block_hash_16"] == [0, opened // 16 * 16]
    assert tokens["none"] == [0, 0]
    # Every document is repaired at its beginning, except one at the beginning of the prompt, which none is.
    assert tokens["lego_link_16"] == [0, shared - 2 * 16]


def test_a_later_turn_that_moves_a_document_reuses_it(reused):
    (first, second), tokens = reused(
        {"query": seq(SYSTEM, plus(DOC_A, DOC_B), ASKED)},
        {"query": seq(SYSTEM, plus(DOC_B), ASKED, ANSWERED, plus(DOC_A), ASKED_AGAIN)},
    )
    # The first turn's question now follows other documents, so its keys and values differ.
    assert tokens["pic"] == [0, length(spans_with(second, SYSTEM, DOC_A, DOC_B))]
    assert tokens["radix"] == [0, common_prefix(first, second)]


def test_a_later_turn_that_moves_nothing_reuses_the_whole_turn_before(reused):
    (first, _), tokens = reused(
        {"query": seq(SYSTEM, plus(DOC_A, DOC_B), ASKED)},
        {"query": seq(SYSTEM, plus(DOC_A, DOC_B), ASKED, ANSWERED, ASKED_AGAIN)},
    )
    assert tokens["pic"] == tokens["radix"] == [0, first.num_tokens]


def test_different_salts_share_nothing(reused):
    query = seq(SYSTEM, plus(DOC_A), ASKED)
    (first, *_), tokens = reused(
        {"query": query, "cache_salt": "one"},
        {"query": query, "cache_salt": "two"},
        {"query": query, "cache_salt": "one"},
    )
    assert tokens["pic"] == tokens["radix"] == [0, 0, first.num_tokens - 1]


NODES = [seq(SYSTEM, plus(DOC_A, {"user": 'a ) ; "b" (\n\t c\\'}), {"cross": [ASKED]}), {"user": "alone"}, "bare"]
PARSED = [Message("user", node) if isinstance(node, str) else parse(json.dumps(node)) for node in NODES]


@pytest.mark.parametrize("suffix", [".spnl", ".SEXPR"])
@pytest.mark.parametrize("between", ["\n", " ", "", ' ; (not this) "nor this\n'])
def test_both_notations_give_the_same_requests(tmp_path: Path, suffix: str, between: str):
    rows = [*map(json.dumps, NODES), "", {"query": NODES[0]}]
    first = load_workload("queries", path=lines(tmp_path / "queries.jsonl", *rows))
    text = between.join([*map(to_sexpr, PARSED[:2]), '"bare"', to_sexpr(PARSED[0])])
    second = load_workload("queries", path=lines(tmp_path / f"queries{suffix}", f"{between}{text}{between}"))
    expected = [contents(Request(0, 0, describe(query, BUILTIN).request_spans)) for query in (*PARSED, PARSED[0])]
    assert [contents(request) for request in first.requests] == expected
    assert [contents(request) for request in second.requests] == expected
    assert [(request.id, request.group_id) for request in second.requests] == [(i, i) for i in range(4)]
    assert {
        (request.output_len, request.arrived_at, request.cache_salt, request.answer) for request in first.requests
    } == {(64, 0, "", None)}


def test_a_line_ends_only_where_json_lines_end(tmp_path: Path):
    path = tmp_path / "queries.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"user": "one\xe2\x80\xa8two\xc2\x85"}\r\n"three"\r\n')
    texts = asked_texts(load_workload("queries", path=path))
    assert [text.split("\n")[1].removesuffix("<|im_end|>") for text in texts] == ["one\u2028two\x85", "three"]


def test_what_a_line_says_reaches_its_request(tmp_path: Path):
    actual = [
        {"query": "a", "output_tokens": 7, "arrived_s": 1.5, "group": "x", "cache_salt": "tenant", "answer": "42"},
        {"query": "b", "arrived_s": 0, "group": 1, "answer": f"{WORDS[0]} {WORDS[1]}"},
        {"query": "c", "arrived_s": 2, "group": "1", "answer": None, "cache_salt": None},
        {"query": "d", "arrived_s": 2, "output_tokens": None},
        {"query": "e", "arrived_s": 3, "group": "x", "answer": ""},
    ]
    workload = load_workload("queries", path=lines(tmp_path / "told.jsonl", *actual))
    expected = [
        (r.id, r.group_id, r.output_len, r.arrived_at, r.cache_salt, r.answer, "\n" + actual[r.id]["query"] in text)
        for r, text in zip(workload.requests, asked_texts(workload), strict=True)
    ]
    assert expected == [
        (0, 0, 7, 1_500_000_000, "tenant", "42", True),
        (1, 1, 2, 0, "", f"{WORDS[0]} {WORDS[1]}", True),
        (2, 2, 64, 2_000_000_000, "", None, True),
        (3, 3, 64, 2_000_000_000, "", None, True),
        (4, 0, 64, 3_000_000_000, "", "", True),
    ]
    same = load_workload("queries", path=tmp_path / "told.jsonl", output_tokens=3)
    assert {request.output_len for request in same.requests} == {3}


def test_the_first_queries_of_the_first_groups_are_served(tmp_path: Path):
    rows = [{"query": f"q{i}", "group": group} for i, group in enumerate("bacabba")]
    path = lines(tmp_path / "groups.jsonl", *rows)
    served = load_workload("queries", path=path, documents=2, questions_per_document=2)
    assert [re.findall(r"q\d", text) for text in asked_texts(served)] == [["q0"], ["q1"], ["q3"], ["q4"]]
    assert [(request.id, request.group_id) for request in served.requests] == [(0, 0), (1, 1), (2, 1), (3, 0)]
    with pytest.raises(ValueError, match=r"^workload.documents=4; expected at most 3, the documents of queries \(its"):
        load_workload("queries", path=path, documents=4)


def test_equal_spans_share_one_separate_array(tmp_path: Path):
    rows = [seq(SYSTEM, plus(DOC_A, DOC_B, DOC_A), ASKED), seq(SYSTEM, DOC_A, ASKED_AGAIN)]
    first, second = load_workload("queries", path=lines(tmp_path / "shared.jsonl", *rows)).requests
    ordered, independent = spans_with(second, DOC_A)[0], first.spans[1]
    assert first.spans[1].tokens is first.spans[3].tokens is ordered.tokens
    assert first.spans[0].tokens is second.spans[0].tokens
    assert (independent.independent, ordered.independent) == (True, False)
    arrays = [span.tokens for request in (first, second) for span in request.spans]
    assert all(array.base is None and array.dtype == np.int32 for array in arrays)


def tokenizer_folder(folder: Path, template: str | None) -> Path:
    """The built-in tokenizer as files."""
    folder.mkdir()
    BUILTIN.tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


JOINING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_folder_tokenizer_is_named_with_changed_cuts(tmp_path: Path, name: str):
    # One word of the vocabulary over two messages: two and four bytes where the whole text has one token.
    rows = [seq({"user": WORDS[0][:2]}, {"user": WORDS[0][2:]}), {"user": f"{WORDS[0]} {WORDS[1]}"}]
    folder = tokenizer_folder(tmp_path / "joining", JOINING)
    path = lines(tmp_path / "cut.jsonl", *rows, *rows[:1])
    workload = load_workload("queries", path=path, tokenizer=str(folder / name))
    assert asked_texts(workload) == [f"{WORDS[0]}!", f"{WORDS[0]} {WORDS[1]}!", f"{WORDS[0]}!"]
    assert [len(request.tokens) for request in workload.requests] == [7, 3, 7]
    detail = "3 queries in 3 groups, cut.jsonl, joining tokenizer, retokenisation delta 12 of 17 tokens"
    assert workload.provenance.line() == f"local text: {detail}"


def test_the_builtin_tokenizer_is_named(tmp_path: Path):
    workload = load_workload("queries", path=lines(tmp_path / "one.jsonl", ASKED))
    count = workload.requests[0].num_tokens
    detail = (
        f"local text: 1 queries in 1 groups, one.jsonl, builtin tokenizer, retokenisation delta 0 of {count} tokens"
    )
    assert (workload.name, workload.provenance.line()) == ("queries", detail)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("(user", "this is not JSON (Expecting value, column 1); expected JSON lines with one query each, or a file"),
        ("[" * 5000, "query nests deeper than 64; expected fewer levels"),
        ("3", "query is a number; expected a string or an object with one key"),
        ({}, "query has 0 keys; expected"),
        ({"user": "a", "cache_salt": "b"}, "query has 2 keys; expected"),
        ('{"query": {"user": "a", "user": "b"}}', "an object names user twice; expected each key once"),
        (seq(), "query holds no message; expected at least one of system, user, assistant"),
        ({"query": plus(seq())}, "query holds no message"),
        ({"query": seq("a", {"plus": ["b", 3]})}, "query.seq[1].plus[1] is a number; expected a string or an object"),
        ({"query": None}, "query is null; expected"),
        ({"query": "\ud800"}, "query holds half of a surrogate pair"),
        ({"query": "a", "outputs": 3}, "outputs is an unknown field; expected one of output_tokens, arrived_s, group"),
        ({"query": "a", "line": 3}, "line is an unknown field; expected one of"),
        ({"query": "a", "output_tokens": 0}, "output_tokens is 0; expected a whole number from 1 up"),
        ({"query": "a", "output_tokens": True}, "output_tokens is true; expected a whole number from 1 up"),
        ({"query": "a", "output_tokens": 2.0}, "output_tokens is 2.0; expected a whole number from 1 up"),
        ({"query": "a", "arrived_s": -1}, "arrived_s is -1; expected seconds from 0 up"),
        ({"query": "a", "arrived_s": float("nan")}, "arrived_s is NaN; expected seconds from 0 up"),
        ('{"query": "a", "arrived_s": 1e999}', "arrived_s is Infinity; expected seconds from 0 up"),
        ({"query": "a", "group": 1.5}, "group is 1.5; expected a string or a whole number"),
        ({"query": "a", "cache_salt": 7}, "cache_salt is 7; expected a string"),
        ({"query": "a", "answer": ["b"]}, 'answer is ["b"]; expected a string'),
        ({"query": "a", "answer": "\ud800"}, 'answer is "\\ud800"; expected a string'),
        (plus(seq(plus("a"), {"cross": ["b"]})), "query has a cross inside a seq inside a plus"),
    ],
)
def test_a_bad_line_says_which_it_is(tmp_path: Path, row: object, problem: str):
    path = lines(tmp_path / "bad.jsonl", '"fine"', "", row)
    with pytest.raises(ValueError, match=f"^workload.path=.*bad.jsonl line 3: {re.escape(problem)}") as raised:
        load_workload("queries", path=path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('(seq "a"\n  (user 3))', ": query, line 4, column 9: 3 as the text of user; expected one string"),
        ('"b" (seq "a"\n', ": query, line 3, column 5: this ( is never closed; expected a ) for it"),
        ('  (user "a\n)', ': query, line 3, column 9: this string never ends; expected a closing "'),
        ('(user "a"))', ": query, line 3, column 11: ); expected a string or ("),
        ('{"user": "a"}', ": query, line 3, column 1: {; expected a string or ("),
        ('\n (plus ; "a"\n)', " line 4: query holds no message; expected at least one of"),
        ('(plus (seq (cross "a")))', " line 3: query has a cross inside a seq inside a plus"),
    ],
)
def test_a_bad_expression_says_where_in_the_file_it_is(tmp_path: Path, text: str, problem: str):
    path = lines(tmp_path / "bad.sexpr", '(user\n "fine")', text)
    with pytest.raises(ValueError, match=f"^workload.path=.*bad.sexpr{re.escape(problem)}"):
        load_workload("queries", path=path)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.spnl"])
def test_a_file_without_a_query_is_refused(tmp_path: Path, name: str):
    text = "\n \n" if name.endswith("l") and "json" in name else "\n ; (user) \n"
    with pytest.raises(ValueError, match=f"^workload.path=.*{name} holds no query; expected JSON lines"):
        load_workload("queries", path=lines(tmp_path / name, text))


@pytest.mark.parametrize(("rows", "said"), [((0, None, 1), (2, 1)), ((None, 3), (1, 2))])
def test_times_in_some_lines_only_are_refused(tmp_path: Path, rows: tuple, said: tuple[int, int]):
    path = lines(tmp_path / "times.jsonl", *({"query": "a", "arrived_s": time} for time in rows))
    untimed, timed = said
    sentence = f"line {untimed} has no arrived_s and line {timed} has one; expected it in every line or none$"
    with pytest.raises(ValueError, match=f"^workload.path=.*times.jsonl {sentence}"):
        load_workload("queries", path=path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^workload.path=.*gone.jsonl is not a file; expected JSON lines with one"):
        load_workload("queries", path=tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"^workload.kind=queries, source=local needs workload.path: expected a file"):
        load_workload("queries")
    (tmp_path / "latin.jsonl").write_bytes(b'{"user": "\xe4"}')
    with pytest.raises(ValueError, match=r"^workload.path=.*latin.jsonl is not UTF-8 text, at byte 10; expected"):
        load_workload("queries", path=tmp_path / "latin.jsonl")


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path):
    path, folder = lines(tmp_path / "one.jsonl", ASKED), tokenizer_folder(tmp_path / "plain", None)
    with pytest.raises(ValueError, match=r"^workload.tokenizer=.*plain has no chat template; expected a folder with"):
        load_workload("queries", path=path, tokenizer=folder)
    with pytest.raises(ValueError, match=r"^workload.tokenizer=some/name cannot be read: .* holds no tokenizer.json"):
        load_workload("queries", path=path, tokenizer="some/name")


def test_a_template_that_does_not_take_a_query_names_its_line(tmp_path: Path):
    numbered = CHATML.replace("<|im_start|>{{", "<|im_start|>{{ loop.index }} {{")
    folder = tokenizer_folder(tmp_path / "numbered", numbered)
    path = lines(tmp_path / "two.jsonl", ASKED, plus("a", "b"))
    with pytest.raises(ValueError, match=r"^workload.path=.*two.jsonl line 2: the chat template of numbered"):
        load_workload("queries", path=path, tokenizer=folder)


@pytest.mark.parametrize(("key", "value"), [("max_prompt_tokens", 9), ("cache_dir", "x")])
def test_settings_that_would_change_nothing_are_refused(key: str, value: object):
    sentence = f"workload.{key}={value} with workload.kind=queries: expected workload.{key}=null, for it goes with "
    with pytest.raises(ValueError, match=f"^{sentence}narrativeqa, "):
        WORKLOADS.of("workload", {"kind": "queries", "path": "y", key: value})
