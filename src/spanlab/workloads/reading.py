"""Workloads of reading comprehension: QuALITY, NarrativeQA, system prompts and tokenised
prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spanlab.kinds import field
from spanlab.registry import positive
from spanlab.workloads.files import (
    LARGEST_TOKEN,
    JsonRow,
    SourceUnavailable,
    group_numbers,
    integers,
    read_columns,
    read_csv,
    read_jsonl,
    read_text,
    token_lists,
)
from spanlab.workloads.load import WORKLOADS, Arranged, Cut, Drawn, OfFile, OfTextFile, WithPreamble
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import JOINTS, REUSABLE, Shape, committed, measure
from spanlab.workloads.text import (
    NARRATIVEQA,
    QUALITY,
    SYSTEM_PROMPTS,
    Document,
    Part,
    Question,
    TokenizerFile,
    encode_documents,
    encode_texts,
    find_tokenizer,
    hub_rows,
    joints_of,
    option_line,
    text_corpus,
)
from spanlab.workloads.workload import Corpus, EncodedText, Row, workload

# ------------------------------------------------------------------------------
# QuALITY: long articles, each with about twenty multiple-choice questions.
# ------------------------------------------------------------------------------

QUALITY_HUB = "tasksource/QuALITY"
SPLIT = "validation"
KEY = "workload.path"
QUALITY_EXPECTED = "a QuALITY jsonl with article_id or doc_id, article, and questions[{question, options, gold_label}]"


@dataclass
@WORKLOADS.register("quality")
class Quality(Drawn, Arranged, Cut, OfTextFile):
    """QuALITY: long articles, each with several questions."""


@workload("quality", "shape")
def measured_quality(path: Path | None = None) -> Corpus:
    """Return QuALITY by measured lengths: the committed shape, or the one at `path`."""
    return committed("quality", path).corpus()


@workload("quality", "local")
def local_quality(
    path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None
) -> Corpus:
    """Read QuALITY from a jsonl file: the official one, or one article per row with
    `gold_index`."""
    documents = articles(read_jsonl(path, KEY, QUALITY_EXPECTED))
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {path.name}"
    return text_corpus(("quality", "local text", nouns), documents, QUALITY, tokenizer, cache_dir)


@workload("quality", "hub")
def hub_quality(tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Load QuALITY from the hub, which has one row per question with its article."""
    find_tokenizer(tokenizer)  # reports a missing tokenizer before a download of minutes
    documents = articles(hub_rows(QUALITY_HUB, SPLIT, QUALITY_EXPECTED))
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {QUALITY_HUB} {SPLIT}"
    return text_corpus(("quality", "hub text", nouns), documents, QUALITY, tokenizer, cache_dir)


def articles(rows: Iterable[JsonRow]) -> list[Document]:
    """Group the question sets of different writers by article, in order of first appearance."""
    questions: dict[tuple[str, str], list[Question]] = {}
    for row in rows:
        name = row.get("article_id", row.get("doc_id"))
        if name is None:
            row.field("article_id")
        text = row.field("article", str).strip()
        entries = row.rows("questions") if "questions" in row else [row]
        questions.setdefault((str(name), text), []).extend(map(_quality_question, entries))
    return [Document(text, tuple(listed)) for (_, text), listed in questions.items()]


def _quality_question(row: JsonRow) -> Question:
    text = row.field("question", str).strip()
    options = tuple(option.strip() for option in row.list_of("options", str))
    labels = {name: row[name] for name in ("gold_label", "gold_index") if row.get(name) is not None}
    for name in labels:
        row.field(name, int)
    if not labels:  # as in the test split
        return Question(text, options)
    index = labels["gold_label"] - 1 if "gold_label" in labels else labels["gold_index"]
    if not 0 <= index < len(options):
        raise row.error(f"the gold option number {index} of {len(options)}")
    return Question(text, options, (option_line(index, options[index]),))


# ------------------------------------------------------------------------------
# NarrativeQA: complete books and film scripts, each with about thirty questions.
# ------------------------------------------------------------------------------

HUB_EXPECTED = "rows with document{id, text}, question{text} and answers[{text}]"
NARRATIVEQA_HUB = "deepmind/narrativeqa"
NARRATIVEQA_EXPECTED = "the NarrativeQA folder with documents.csv, qaps.csv and tmp/<document_id>.content (or stories/)"


@dataclass
@WORKLOADS.register("narrativeqa")
class NarrativeQA(Drawn, Arranged, Cut, OfTextFile):
    """NarrativeQA: long stories, thirty questions each."""


@workload("narrativeqa", "shape")
def measured_narrativeqa(path: Path | None = None) -> Corpus:
    """Return NarrativeQA by modelled lengths: the committed shape, or the one at `path`."""
    return committed("narrativeqa", path).corpus()


@workload("narrativeqa", "local")
def local_narrativeqa(
    path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None
) -> Corpus:
    """Read NarrativeQA from its official folder, every question once."""
    if not path.is_dir():
        raise SourceUnavailable(f"{KEY}={path} is not a folder; expected {NARRATIVEQA_EXPECTED}")
    questions: dict[str, list[Question]] = {}
    columns = ("document_id", "question", "answer1", "answer2")
    for row in read_csv(path / "qaps.csv", columns, KEY, NARRATIVEQA_EXPECTED):
        question = _narrativeqa_question(row["question"], (row["answer1"], row["answer2"]))
        questions.setdefault(row["document_id"], []).append(question)
    listed = read_csv(path / "documents.csv", ("document_id",), KEY, NARRATIVEQA_EXPECTED)
    names = [row["document_id"] for row in listed if row["document_id"] in questions]
    if not names:
        raise ValueError(
            f"{KEY}={path} has no document with a question in qaps.csv; expected {NARRATIVEQA_EXPECTED}"
        )
    documents = [Document(_story(path, name), tuple(questions[name])) for name in names]
    nouns = f"{{documents}} NarrativeQA stories, {{requests}} questions, {path.resolve().name}"
    return text_corpus(
        ("narrativeqa", "local text", nouns), documents, NARRATIVEQA, tokenizer, cache_dir
    )


@workload("narrativeqa", "hub")
def hub_narrativeqa(tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Load NarrativeQA from the hub, which has one row per question with its story."""
    find_tokenizer(tokenizer)  # reports a missing tokenizer before a download of minutes
    nouns = f"{{documents}} NarrativeQA stories, {{requests}} questions, {NARRATIVEQA_HUB} {SPLIT}"
    rows = hub_rows(NARRATIVEQA_HUB, SPLIT, HUB_EXPECTED)
    stories: dict[str, str] = {}
    questions: dict[str, list[Question]] = {}
    for row in rows:
        document, answers = row.row("document"), row.rows("answers")
        name = document.field("id", str)
        stories.setdefault(name, document.field("text", str).strip())
        question = _narrativeqa_question(
            row.row("question").field("text", str),
            [answer.field("text", str) for answer in answers],
        )
        questions.setdefault(name, []).append(question)
    documents = [Document(stories[name], tuple(listed)) for name, listed in questions.items()]
    return text_corpus(
        ("narrativeqa", "hub text", nouns), documents, NARRATIVEQA, tokenizer, cache_dir
    )


def _story(folder: Path, name: str) -> str:
    for subfolder in ("tmp", "stories"):
        path = folder / subfolder / f"{name}.content"
        if path.is_file():
            # Some stories are in older encodings; a replaced letter changes a token, but the
            # document stays usable.
            return path.read_text(encoding="utf-8", errors="replace").strip()
    raise SourceUnavailable(
        f"{KEY}={folder} has no story {name}.content; expected {NARRATIVEQA_EXPECTED}"
    )


def _narrativeqa_question(text: str, answers: Iterable[str]) -> Question:
    return Question(
        text.strip(), answers=tuple(answer.strip() for answer in answers if answer.strip())
    )


# ------------------------------------------------------------------------------
# Shape of NarrativeQA from its published story lengths, because we may not ship the stories.
# ------------------------------------------------------------------------------

# Published: 46,765 questions on 1,572 documents, 29.7 per document.
QUESTIONS_PER_DOCUMENT = 30
ASSIGNMENT_SEED = 1712
STUB_START = 2**30

QUESTIONS_KEY, WORDS_KEY = "workload.questions_path", "workload.words_path"
LENGTHS_EXPECTED = "NarrativeQA's documents.csv with document_id and story_word_count"
QUESTIONS_EXPECTED = "the FairytaleQA jsonl with story and questions[{question, answers}]"
WORDS_EXPECTED = "the QuALITY jsonl with article, one article a row"


def model(
    lengths_path: Path,
    questions_path: Path | None,
    words_path: Path | None,
    tokenizer: TokenizerFile,
) -> Shape:
    """Model each story by its published word count, QuALITY's tokens per word, and thirty
    FairytaleQA questions."""
    rows = read_csv(
        lengths_path, ("document_id", "story_word_count"), "workload.path", LENGTHS_EXPECTED
    )
    for row in rows:
        count = row["story_word_count"].strip()
        if not count.isdecimal() or len(count) > len(str(LARGEST_TOKEN)):
            raise ValueError(
                f"workload.path={lengths_path} has story_word_count={count[:40]!r} for "
                f"{row['document_id']}; expected a whole number from 0 up, as {LENGTHS_EXPECTED}"
            )
    word_counts = np.array([int(row["story_word_count"]) for row in rows], dtype=np.float64)
    tales = read_jsonl(questions_path, QUESTIONS_KEY, QUESTIONS_EXPECTED)
    articles = read_jsonl(words_path, WORDS_KEY, WORDS_EXPECTED)
    ratios = {
        "quality": tokens_per_word(
            _texts(articles, "article", words_path, WORDS_KEY, WORDS_EXPECTED), tokenizer
        ),
        "fairytaleqa": tokens_per_word(
            _texts(tales, "story", questions_path, QUESTIONS_KEY, QUESTIONS_EXPECTED), tokenizer
        ),
    }
    distinct: dict[str, Question] = {}  # a repeated question has the answers of its first place
    for tale in tales:
        for entry in tale.rows("questions"):
            text = entry.field("question", str).strip()
            distinct.setdefault(text, Question(text, answers=tuple(entry.list_of("answers", str))))
    questions = assign_questions(list(distinct.values()), len(word_counts))
    shape = _stub_shape(questions, tokenizer, ratios)
    # stubs are the reusable spans, in the order of their documents: replace their lengths
    lengths = np.rint(word_counts * ratios["quality"]).astype(np.int64)
    stubs = np.flatnonzero(shape.flags & REUSABLE)
    assert len(stubs) == len(lengths), "one stub per document"
    assert not shape.lcps[stubs].any(), "stubs share nothing"
    replaced = shape.lengths.copy()
    replaced[stubs] = lengths
    return replace(shape, lengths=replaced)


def tokens_per_word(texts: Sequence[str], tokenizer: TokenizerFile) -> float:
    """Return tokens divided by words over all distinct texts; words are separated by white
    space."""
    distinct = list(dict.fromkeys(texts))
    tokens = encode_texts(distinct, tokenizer)
    return sum(len(tokens[text]) for text in distinct) / sum(len(text.split()) for text in distinct)


def _texts(
    rows: Sequence[JsonRow], name: str, path: Path | None, key: str, expected: str
) -> list[str]:
    """Return a text of each row; raise ValueError if there is no word in any."""
    texts = [row.field(name, str) for row in rows]
    if not any(map(str.split, texts)):
        raise ValueError(f"{key}={path} has no word in any {name}; expected {expected}")
    return texts


def assign_questions(questions: Sequence[Question], documents: int) -> list[tuple[Question, ...]]:
    """Shuffle the questions once and assign them cyclically, so that no document has the same
    question twice."""
    order = np.random.default_rng(ASSIGNMENT_SEED).permutation(len(questions)).tolist()
    if len(order) < QUESTIONS_PER_DOCUMENT:
        raise ValueError(
            f"workload.questions_path holds {len(order)} questions; expected at least {QUESTIONS_PER_DOCUMENT}"
        )
    starts = range(0, documents * QUESTIONS_PER_DOCUMENT, QUESTIONS_PER_DOCUMENT)
    ranges = (range(start, start + QUESTIONS_PER_DOCUMENT) for start in starts)
    return [tuple(questions[order[index % len(order)]] for index in indexes) for indexes in ranges]


def _stub_shape(
    question_sets: Sequence[tuple[Question, ...]],
    tokenizer: TokenizerFile,
    ratios: dict[str, float],
) -> Shape:
    """Measure real questions around stub documents of one token each, with ids outside any
    vocabulary."""
    documents = [
        Document(np.array([STUB_START + number], dtype=np.int32), questions)
        for number, questions in enumerate(question_sets)
    ]
    detail = (
        f"{{documents}} NarrativeQA stories by published word count at {ratios['quality']:.3f} tokens per word "
        f"(QuALITY articles), {{requests}} FairytaleQA questions and answer lengths, {tokenizer.name} tokenizer"
    )
    corpus = encode_documents(documents, NARRATIVEQA, tokenizer).corpus(
        "narrativeqa", "modelled", detail
    )
    workload = select(corpus, Selection(unknown_output=0))
    joints = {JOINTS: joints_of(NARRATIVEQA, tokenizer).counts()}
    return measure(workload, detail=detail, tokens_per_word=ratios, **joints)


# ------------------------------------------------------------------------------
# System prompts of deployed assistants, each followed by user queries.
# ------------------------------------------------------------------------------

SYSTEM_PROMPTS_EXPECTED = "a folder of Markdown prompts or a Parquet file with prompt_id and tokens"
QUERIES_KEY = "workload.queries_path"
QUERIES_EXPECTED = "a jsonl file with one user query a row, in the field query"
QUERY_SEED = 20240229
QUERIES_PER_PROMPT = 30  # as in the committed shape


@dataclass
@WORKLOADS.register("system_prompts")
class SystemPrompts(Drawn, Arranged, Cut, OfTextFile):
    """System prompts of deployed assistants with user queries."""

    output_tokens: int | None = field(
        64, positive, "output tokens per request; null: as in the source"
    )
    queries_path: str | None = field(None, None, "user queries; local text only")
    queries_per_prompt: int | None = field(
        None,
        positive,
        "user queries for each local system prompt; null: 30, or all if there are fewer",
    )


@workload("system_prompts", "shape")
def measured_system_prompts(path: Path | None = None) -> Corpus:
    """Return system prompts by measured lengths: the committed shape, or the one at `path`."""
    return committed("system_prompts", path).corpus()


@workload("system_prompts", "local")
def local_system_prompts(
    path: Path,
    queries_path: Path | None = None,
    tokenizer: str | Path | None = None,
    cache_dir: Path | None = None,
    queries_per_prompt: int | None = None,
) -> Corpus:
    """Read system prompts from a folder of Markdown files or a table of token ids, and queries from
    a jsonl file."""
    if path is not None and path.is_dir():
        files = sorted(path.rglob("*.md"))
        if not files:
            raise ValueError(
                f"{KEY}={path} holds no Markdown file; expected {SYSTEM_PROMPTS_EXPECTED}"
            )
        bodies: list[Part] = [
            read_text(file, KEY, SYSTEM_PROMPTS_EXPECTED).strip() for file in files
        ]
    else:
        if path is None or not path.is_file():
            raise SourceUnavailable(
                f"{KEY}={path} does not exist; expected {SYSTEM_PROMPTS_EXPECTED}"
            )
        table = read_columns(path, ("prompt_id", "tokens"), KEY, SYSTEM_PROMPTS_EXPECTED)
        bodies = list(token_lists(table, "tokens", path, KEY, SYSTEM_PROMPTS_EXPECTED))
    queries = read_queries(queries_path)
    documents = draw_queries(
        bodies, queries, queries_per_prompt or min(QUERIES_PER_PROMPT, len(queries))
    )
    nouns = f"{{documents}} system prompts, {{requests}} user queries, {path.name}"
    layout = SYSTEM_PROMPTS
    return text_corpus(
        ("system_prompts", "local text", nouns), documents, layout, tokenizer, cache_dir
    )


def read_queries(path: Path | None) -> list[str]:
    """Return distinct user queries in file order; rows of a `kind` other than chat, such as search,
    are left out."""
    rows = read_jsonl(path, QUERIES_KEY, QUERIES_EXPECTED)
    chat = [row for row in rows if row.get("kind", "chat") == "chat"]
    texts = (row.field("query", str).strip() for row in chat)
    queries = list(dict.fromkeys(text for text in texts if text))
    if not queries:
        raise ValueError(f"{QUERIES_KEY}={path} holds no chat query; expected {QUERIES_EXPECTED}")
    return queries


def draw_queries(bodies: list[Part], queries: list[str], per_prompt: int) -> list[Document]:
    """Draw `per_prompt` different queries for each prompt; the draw is the same on every
    machine."""
    if not 1 <= per_prompt <= len(queries):
        raise ValueError(
            f"workload.queries_per_prompt={per_prompt}; expected 1 to {len(queries)}, the number of queries"
        )
    rng = np.random.default_rng(QUERY_SEED)
    draws = [rng.choice(len(queries), size=per_prompt, replace=False) for _ in bodies]
    return [
        Document(body, tuple(Question(queries[index]) for index in indexes))
        for body, indexes in zip(bodies, draws, strict=True)
    ]


# ------------------------------------------------------------------------------
# Tokenised prompts: a Parquet table of token ids.
# ------------------------------------------------------------------------------

COLUMNS = ("group_id", "idx", "tokens", "n_tokens")
TOKENISED_EXPECTED = "a Parquet file with the columns group_id, idx, tokens and n_tokens"


@dataclass
@WORKLOADS.register("tokenised")
class Tokenised(Drawn, WithPreamble, Cut, OfFile):
    """Prompts given as token ids: a Parquet file with group_id, idx, tokens, n_tokens."""

    vocab_fold: int | None = field(None, positive, "token ids modulo this number")


@workload("tokenised", "local")
def local_tokenised(path: Path, vocab_fold: int | None = None) -> Corpus:
    """Return one request per row in file order, of one ordered span; groups are numbered by first
    appearance."""
    table = read_columns(path, COLUMNS, KEY, TOKENISED_EXPECTED)
    spans = token_lists(table, "tokens", path, KEY, TOKENISED_EXPECTED, vocab_fold)
    stated = integers(table, "n_tokens", path, KEY, TOKENISED_EXPECTED)
    mismatches = np.flatnonzero(stated != [len(span) for span in spans])
    if len(mismatches):
        row = int(mismatches[0])
        raise ValueError(
            f"{KEY}={path} has n_tokens={stated[row]} in row {row} where the column tokens holds "
            f"{len(spans[row])}; expected n_tokens to be the length of tokens"
        )
    groups = group_numbers(table, "group_id", path, KEY, TOKENISED_EXPECTED)
    rows = tuple(Row(group, (index,)) for index, group in enumerate(groups))
    flags = np.zeros(len(spans), dtype=bool)
    detail = f"{{requests}} prompts in {{documents}} groups, {path.name}"
    return EncodedText(spans, flags, flags, rows).corpus("tokenised", "local text", detail)
