"""Questions with known answers, over passages from a real retriever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Request, Span
from spanlab.core.token_string import Tokens
from spanlab.kinds import check_fields, field
from spanlab.queries.render import ChatTokenizer, check_bos, check_open_turn, missing_bos
from spanlab.registry import Registry, not_negative, positive
from spanlab.workloads.load import WORKLOADS, Limited, OfFile, OfText
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.rag import ORDERS
from spanlab.workloads.selection import Selection, check_documents
from spanlab.workloads.tasks import TASKS, Document, Facts, Question, Task, check_task
from spanlab.workloads.text import option_lines
from spanlab.workloads.workload import Label, Provenance, Workload, workload

# ------------------------------------------------------------------------------
# Prompts of passages: a chat whose user turn has the passages and the question, each tokenised
# separately.
# ------------------------------------------------------------------------------

_BLANK_LINE = "\n\n"
_HEADING = f"Passages:{_BLANK_LINE}"


class PromptWriter:
    """Writer of prompt spans in a tokenizer's chat template.

    `head`     span that all prompts share: the instruction, and the user turn up to its first
               passage.
    `passage`  returns the span of a text, which does not depend on its position; equal texts share
               a span.
    """

    def __init__(self, tokenizer: ChatTokenizer, instruction: str, system: bool) -> None:
        """`system`: the instruction is a system message; else it opens the user message, if
        templates lack the role."""
        roles = ["system", "user"] if system else ["user"]
        gaps = tokenizer.template.gaps(roles, open_turn=True)
        check_open_turn(tokenizer.template, roles, gaps)
        head = tokenizer.encode(
            f"{gaps[0]}{instruction}{gaps[1] if system else _BLANK_LINE}{_HEADING}"
        )
        head = np.concatenate([missing_bos(int(head[0]), tokenizer), head])
        check_bos(np.concatenate([head, tokenizer.encode(gaps[-1])]), tokenizer)
        self.name, self._tokenizer, self._opening = tokenizer.name, tokenizer, gaps[-1]
        self.head = Span(head, reusable=True)
        self.passage = cache(
            lambda text: Span(self._literal(f"{text}{_BLANK_LINE}"), independent=True)
        )

    def question(self, question: Question) -> Span:
        """Return the span of the question with its options, and of the assistant turn up to the
        stem."""
        question_text = f"Question: {question.text}{option_lines(question.choices)}"
        if any(
            special in question_text + question.stem for special in self._tokenizer.special_texts
        ):
            parts = (
                self._literal(question_text),
                self._tokenizer.encode(self._opening),
                self._literal(question.stem),
            )
            return Span(np.concatenate(parts))
        return Span(self._tokenizer.encode(f"{question_text}{self._opening}{question.stem}"))

    def answer_tokens(self, question: Question) -> int:
        """Return the tokens of the longest gold answer as a continuation of the prompt, at least
        one."""
        space = " " if question.stem else ""
        return max(1, *(len(self._literal(space + answer)) for answer in question.answers))

    def _literal(self, text: str) -> Tokens:
        """Tokenise untrusted text, in which special tokens are plain characters."""
        return self._tokenizer.encode_with_offsets(text, literal=True).tokens


# ------------------------------------------------------------------------------
# Retrievers: rankings of passages for each question, best first.
# ------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Query:
    """Input of a retriever; numbers are indexes of the searched passages.

    `gold`, `ranking`  as in a task's question; None if unknown.
    """

    text: str
    gold: tuple[int, ...] | None = None
    ranking: tuple[int, ...] | None = None


#: Functions of passages and queries that return, for each query, numbers of passages, best first.
RETRIEVERS: Registry[list[Ints]] = Registry(
    "workload.questions.retrieval", given=("passages", "queries", "draw"), order=("dense",)
)


@RETRIEVERS.register("bm25")
def bm25(passages: Sequence[str], queries: Sequence[Query]) -> list[Ints]:
    """Okapi BM25 as Lucene scores it (k1 = 1.5, b = 0.75): lower-case words without English stop
    words."""
    import bm25s

    index = bm25s.BM25()
    word_lists = bm25s.tokenize(
        [*passages, *(query.text for query in queries)], return_ids=False, show_progress=False
    )
    if not any(word_lists[: len(passages)]):
        raise ValueError(
            "workload.questions.retrieval=bm25: expected passages with words, not stop words alone"
        )
    index.index(word_lists[: len(passages)], show_progress=False)
    # Without words, as of stop words alone, a question scores zero everywhere, as one whose words
    # are in no passage.
    no_scores = np.zeros(len(passages))
    return [
        rank_by_score(index.get_scores(query_words) if query_words else no_scores)
        for query_words in word_lists[len(passages) :]
    ]


@RETRIEVERS.register("given")
def rank_as_given(
    passages: Sequence[str], queries: Sequence[Query], draw: np.random.Generator
) -> list[Ints]:
    """Rank passages as the file lists them; else the gold passages first, then the others in random
    order."""
    rankings = []
    for query in queries:
        if query.ranking is not None:
            rankings.append(np.array(query.ranking, dtype=np.int64))
            continue
        if query.gold is None:
            raise ValueError(
                "workload.questions.retrieval=given: expected bm25 or dense, because the task has no gold passages"
            )
        others = np.setdiff1d(np.arange(len(passages)), query.gold)
        rankings.append(
            np.concatenate([np.array(query.gold, dtype=np.int64), draw.permutation(others)])
        )
    return rankings


def rank_by_score(scores: Floats) -> Ints:
    """Return passage numbers by decreasing score; ties keep their order."""
    return np.argsort(-scores, kind="stable")


# ------------------------------------------------------------------------------
# Retrieval of the passages of each prompt, from a document or from the corpus, and their order.
# ------------------------------------------------------------------------------

SEARCHES = ("corpus", "document")


@dataclass(frozen=True, slots=True)
class RetrievedPassages:
    """A question with the passages of its prompt.

    `document`  number of its document among the selected documents.
    `passages`  passages in the order of the prompt.
    `gold`      positions of the retrieved gold passages in the prompt, the one that states the
                answer first; None if unknown.
    `position`  position of the passage that states the answer; −1: not retrieved; None if unknown.
    `stated`    text of the passage that states the answer; None if unknown.
    """

    document: int
    question: Question
    passages: tuple[str, ...]
    gold: tuple[int, ...] | None
    position: int | None
    stated: str | None


def retrieve_passages(documents: Sequence[Document], options: Questions) -> list[RetrievedPassages]:
    """Retrieve the passages of each question by document; ValueError if no question can get k
    passages."""
    scopes = (
        [tuple(range(len(documents)))]
        if options.search == "corpus"
        else [(number,) for number in range(len(documents))]
    )
    # One stream for each kind of draw, so that another order changes nothing else.
    rng, order_rng = (np.random.default_rng([options.seed, stream]) for stream in (1, 2))
    results = [
        result
        for numbers in scopes
        for result in _search(documents, numbers, options, rng, order_rng)
    ]
    most_passages = max(len(result.passages) for result in results)
    if options.k is not None and options.k > most_passages:
        raise ValueError(
            f"workload.questions.k={options.k}: expected at most {most_passages}, the passages that can be retrieved"
        )
    return results


def _search(
    documents: Sequence[Document],
    numbers: Sequence[int],
    options: Questions,
    draw: np.random.Generator,
    shuffle: np.random.Generator,
) -> Iterator[RetrievedPassages]:
    """Retrieve passages from these documents for the questions about them; equal passages count
    once."""
    passage_numbers: dict[str, int] = {}
    for number in numbers:
        for passage in documents[number].passages:
            passage_numbers.setdefault(passage, len(passage_numbers))
    passages = tuple(passage_numbers)
    pairs = [(number, question) for number in numbers for question in documents[number].questions]
    queries = []
    for number, question in pairs:
        texts = documents[number].passages
        gold, ranks = (
            None if indexes is None else tuple(passage_numbers[texts[index]] for index in indexes)
            for indexes in (question.gold, question.ranking)
        )
        queries.append(Query(question.text, gold, ranks))
    rankings = RETRIEVERS.make(
        options.retrieval, {}, {}, passages=passages, queries=queries, draw=draw
    )
    for (number, question), query, ranking in zip(pairs, queries, rankings, strict=True):
        order = ORDERS[options.order](ranking[: options.k], shuffle)
        texts = tuple(passages[index] for index in order)
        if query.gold is None:
            yield RetrievedPassages(number, question, texts, None, None, None)
        else:
            position_of = {passage: index for index, passage in enumerate(order.tolist())}
            gold = tuple(position_of[passage] for passage in query.gold if passage in position_of)
            first = query.gold[0]
            yield RetrievedPassages(
                number, question, texts, gold, position_of.get(first, -1), passages[first]
            )


# ------------------------------------------------------------------------------
# Requests of questions and their passages, with labels, and the overlap of their prompts.
# ------------------------------------------------------------------------------

#: Tokens that a generated answer may have beyond the longest gold answer.
ROOM = 8


def make_workload(
    task: Task,
    retrieved: Sequence[RetrievedPassages],
    writer: PromptWriter,
    selection: Selection,
    how: str,
) -> Workload:
    """Make one request per question, in groups by document.

    Spans: head, passages, question with the opened answer. Labels: `task`; `opening`, the words
    that open the answer; `choices`, one a line; and if gold passages are known, `gold_position`
    (−1: not retrieved) and `gold_tokens` of the passage that states the answer.

    `how`  description of retriever and order.
    """
    requests = []
    for number, item in enumerate(retrieved):
        question = item.question
        passages = [writer.passage(text) for text in item.passages]
        request = Request(
            number,
            item.document,
            (writer.head, *passages, writer.question(question)),
            selection.output_tokens or writer.answer_tokens(question) + ROOM,
            answer="\n".join(question.answers),
            gold=tuple(1 + position for position in item.gold or ()),
        )
        requests.append(request)
    _check_length(requests, retrieved, selection)
    labels: dict[str, tuple[Label, ...]] = {
        "task": tuple(item.question.label or task.name for item in retrieved),
        "opening": tuple(item.question.stem for item in retrieved),
        "choices": tuple("\n".join(item.question.choices) for item in retrieved),
    }
    positions = [item.position for item in retrieved if item.position is not None]
    if positions:
        labels["gold_position"] = tuple(positions)
        stated = [item.stated for item in retrieved if item.stated is not None]
        labels["gold_tokens"] = tuple(len(writer.passage(text).tokens) for text in stated)
    lengths = [request.num_tokens for request in requests]
    complete = [
        len(item.gold) == len(set(item.question.gold or ()))
        for item in retrieved
        if item.gold is not None
    ]
    completeness = (
        [f"all gold passages found for {sum(complete) / len(complete):.0%}"] if complete else []
    )
    detail = [
        _question_detail(task, retrieved, how),
        *completeness,
        f"prompts of {np.median(lengths):.0f} tokens (median), at most {max(lengths)}",
        f"{overlap(requests):.0%} of the passages' tokens stood in an earlier prompt",
        f"{writer.name} tokenizer",
    ]
    return Workload(task.name, tuple(requests), Provenance(task.kind, ", ".join(detail)), labels)


def _check_length(
    requests: Sequence[Request], retrieved: Sequence[RetrievedPassages], selection: Selection
) -> None:
    """Raise ValueError for prompts longer than the limit; name a passage that alone exceeds it."""
    limit = selection.max_prompt_tokens
    for request, item in zip(requests, retrieved, strict=True):
        if limit is None or request.num_tokens <= limit:
            continue
        longest = max(request.spans[1:-1], key=lambda span: len(span.ids))
        text = item.passages[request.spans.index(longest) - 1]
        problem = (
            f"the prompt of question {request.id} has {request.num_tokens:,} tokens: expected a "
            "smaller k or shorter"
        )
        if len(longest.ids) > limit:
            problem = f"the passage {text[:40]!r} has {len(longest.ids):,} tokens: expected shorter"
        raise ValueError(f"workload.max_prompt_tokens={limit}: {problem} passages")


def _question_detail(task: Task, retrieved: Sequence[RetrievedPassages], how: str) -> str:
    documents = len({item.document for item in retrieved})
    left_out = (
        f" ({task.left_out} left out, for their passages are not told apart)"
        if task.left_out
        else ""
    )
    counts = sorted({len(item.passages) for item in retrieved})
    passages = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    return f"{len(retrieved)} questions about {documents} {task.nouns}{left_out}, {passages} passages each {how}"


def overlap(requests: Sequence[Request]) -> float:
    """Return the share of passage tokens that also occur in the prompt of an earlier request."""
    earlier: set[int] = set()
    repeated = tokens = 0
    for request in requests:
        for span in _passages(request):
            tokens += len(span.ids)
            repeated += len(span.ids) * (id(span) in earlier)
        earlier |= {id(span) for span in _passages(request)}
    return repeated / tokens


def _passages(request: Request) -> tuple[Span, ...]:
    return request.spans[1:-1]


# ------------------------------------------------------------------------------
# Selection of the questions of a task, spread evenly over the selected documents.
# ------------------------------------------------------------------------------


def select_questions(
    task: Task, selection: Selection, requests: int | None, seed: int, novel: int | None = None
) -> tuple[Document, ...]:
    """Select the first questions of the first documents; of those, draw at most `requests` by the
    seed.

    The draw is round-robin over documents, so each gets the same number while it has questions
    left. Documents without questions are left out. The last `novel` documents have one question
    each, which `requests` does not count.
    """
    with_questions = [document for document in task.documents if document.questions]
    check_documents(selection, len(with_questions), task.name)
    chosen = [
        replace(document, questions=document.questions[: selection.questions_per_document])
        for document in with_questions[: selection.documents]
    ]
    regular = chosen[: len(chosen) - (novel or 0)]
    novel_documents = chosen[len(chosen) - (novel or 0) :]
    if not regular:
        raise ValueError(
            f"workload.questions.novel={novel}: expected fewer than {len(chosen)}, the documents served"
        )
    regular = regular if requests is None else _draw_questions(regular, requests, seed)
    return *regular, *(
        replace(document, questions=document.questions[:1]) for document in novel_documents
    )


def _draw_questions(documents: list[Document], requests: int, seed: int) -> list[Document]:
    rng = np.random.default_rng([seed, 0])
    slots = [
        (round_number, index)
        for index, document in enumerate(documents)
        for round_number in range(len(document.questions))
    ]
    indexes = [index for _, index in sorted(slots)[:requests]]
    counts = np.bincount(indexes, minlength=len(documents)).tolist()
    selected = []
    for document, count in zip(documents, counts, strict=True):
        numbers = np.sort(rng.permutation(len(document.questions))[:count])
        selected.append(
            replace(document, questions=tuple(document.questions[index] for index in numbers))
        )
    return [document for document in selected if document.questions]


# ------------------------------------------------------------------------------
# The workload `questions`: questions with known answers, over passages from a retriever.
# ------------------------------------------------------------------------------

_KEY = "workload.questions"


@dataclass
class Questions:
    """Questions with known answers, and the passages that a retriever returns for each."""

    task: str | None = field(
        None,
        TASKS,
        "facts (synthetic), or the content of `workload.path`: fairytaleqa, quality, squality, local; null: local if a "
        "path is set, else facts",
    )
    retrieval: str = field(
        "bm25",
        RETRIEVERS,
        "bm25; dense, by embeddings; given: as the file lists them, or gold passages, then others at random",
    )
    search: str = field(
        "corpus",
        SEARCHES,
        "scope of the search: corpus, all served documents; document, the question's document",
    )
    k: int | None = field(
        4, positive, "passages of each prompt, or all if there are fewer; null: all of them"
    )
    order: str = field(
        "ranked",
        ORDERS,
        "order of passages in a prompt: ranked, best first; shuffled for each prompt; fixed, by corpus",
    )
    requests: int | None = field(
        None, positive, "most questions, drawn evenly from all documents; null: all selected ones"
    )
    novel: int | None = field(
        None,
        positive,
        "additional questions, one about each of the last documents, whose passages no other has; null: 0",
    )
    passage_words: int | None = field(
        None, positive, "most words of a passage; quality and squality only; null: 200"
    )
    system: bool = field(
        True, None, "whether the instruction is a system message; else it opens the user message"
    )
    facts: Facts = field(Facts, None, "options of task=facts")
    seed: int = field(0, not_negative, "seed of the draws")

    def __post_init__(self) -> None:
        check_fields(self, _KEY)
        if self.novel is not None and self.search != "document":
            setting = f"{_KEY}.novel={self.novel} with {_KEY}.search={self.search}"
            raise ValueError(
                f"{setting}: expected document, because the corpus includes passages of other questions"
            )
        if self.order == "fixed" and self.k is None:
            raise ValueError(
                f"{_KEY}.order=fixed with {_KEY}.k=null: expected ranked or shuffled, or a number"
            )

    def check(self, path: str | None) -> None:
        """Reject a file that the task does not read, a task without its file, and options of other
        tasks."""
        task = self.task_of(path)
        if TASKS.takes(task, "path") != (path is not None):
            expected = (
                "a file or folder" if path is None else "null, because its facts are synthetic"
            )
            raise ValueError(
                f"workload.path={path} with {_KEY}.task={task}: expected {expected}".replace(
                    "None", "null"
                )
            )
        TASKS.check(f"{_KEY}.options", task, f"{_KEY}.task={task}", {}, self.keys)

    def task_of(self, path: object) -> str:
        """Return the name of the task with or without a path."""
        return self.task or ("facts" if path is None else "local")

    @property
    def keys(self) -> dict[str, Any]:
        """Task options with values other than the default."""
        return {
            "passage_words": self.passage_words,
            "facts": None if self.facts == Facts() else self.facts,
        }


@dataclass
@WORKLOADS.register("questions")
class QuestionsWorkload(Limited, OfText, OfFile):
    """Questions with known answers, over passages from a retriever."""

    questions: Questions = field(Questions, None, "task and retriever")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.questions.check(self.path)

    @property
    def embeds(self) -> bool:
        return self.questions.retrieval == "dense"


@workload("questions", "modelled")
def modelled(
    questions: Questions, selection: Selection, tokenizer: str | Path | None = None
) -> Workload:
    """Return questions about synthetic facts; `tokenizer` None is the built-in tokenizer."""
    return _workload(
        questions, TASKS.make(questions.task_of(None), questions.keys, {}), selection, tokenizer
    )


@workload("questions", "local")
def local(
    path: Path, questions: Questions, selection: Selection, tokenizer: str | Path | None = None
) -> Workload:
    """Return the questions of a file or folder."""
    task = TASKS.make(questions.task_of(path), questions.keys, {}, path=path)
    return _workload(questions, check_task(task, f"workload.path={path}"), selection, tokenizer)


def _workload(
    options: Questions, task: Task, selection: Selection, tokenizer: str | Path | None
) -> Workload:
    """Select documents and questions, then retrieve passages from the selected documents only."""
    chosen = select_questions(task, selection, options.requests, options.seed, options.novel)
    retrieved = retrieve_passages(chosen, options)
    writer = PromptWriter(tokenizer_of(tokenizer), task.instruction, options.system)
    return make_workload(
        task, retrieved, writer, selection, f"by {options.retrieval}, {options.order}"
    )
