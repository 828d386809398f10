"""The door to all workloads: kind and source in, requests out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from spanlab.workloads import (
    alias_questions,
    forked_sequence,
    narrativeqa,
    passages,
    quality,
    queries,
    ragpulse_trace,
    repeated_documents,
    shape,
    synthetic,
    system_prompts,
    tokenised,
)
from spanlab.workloads.alias_questions import AliasQuestions
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.forked_sequence import ForkedSequence
from spanlab.workloads.rag import RagOptions, drawn_requests
from spanlab.workloads.ragpulse import RagPulseOptions, served_trace
from spanlab.workloads.repeated_documents import RepeatedDocuments
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.synthetic import SyntheticOptions
from spanlab.workloads.text_source import TextOptions
from spanlab.workloads.workload import Workload

SHAPES = Path(__file__).parent / "shapes"
EXPECTED = "a file that make_shape wrote, or its folder; workload.source=local reads text"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything that a source may read."""

    text: TextOptions = field(default_factory=TextOptions)
    synthetic: SyntheticOptions = field(default_factory=SyntheticOptions)
    ragpulse: RagPulseOptions = field(default_factory=RagPulseOptions)
    repeated_documents: RepeatedDocuments = field(default_factory=RepeatedDocuments)
    forked_sequence: ForkedSequence = field(default_factory=ForkedSequence)
    alias_questions: AliasQuestions = field(default_factory=AliasQuestions)
    selection: Selection = field(default_factory=Selection)


# A source that is requests already selects them as it reads.
Reader = Callable[[SourceOptions], Corpus | Workload]


def _shape(name: str, path: Path | None) -> shape.Shape:
    """The shape in a file or folder that `make_shape` has written; the committed one where none is given."""
    folder = SHAPES if path is None else path
    file = folder if folder.suffix == ".npz" else folder / f"{name}.npz"
    if not file.is_file():
        raise ValueError(f"workload.path={path} has no {file.name}; expected {EXPECTED}")
    return shape.load(file)


def _measured(name: str) -> Reader:
    return lambda options: _shape(name, options.text.path).corpus()


def _text(read: Callable[[TextOptions], Corpus]) -> Reader:
    return lambda options: read(options.text)


# The first source of a kind is its default.
SOURCES: dict[str, dict[str, Reader]] = {
    "quality": {"shape": _measured("quality"), "local": _text(quality.local), "hub": _text(quality.hub)},
    "narrativeqa": {
        "shape": _measured("narrativeqa"),
        "local": _text(narrativeqa.local),
        "hub": _text(narrativeqa.hub),
    },
    "system_prompts": {"shape": _measured("system_prompts"), "local": _text(system_prompts.local)},
    "rag": {"shape": _measured("rag"), "local": _text(passages.local)},
    "ragpulse": {
        "shape": lambda options: served_trace(_shape("ragpulse", options.text.path), options.ragpulse),
        "local": lambda options: served_trace(ragpulse_trace.read(options.text.path, "local trace"), options.ragpulse),
    },
    "synthetic": {"modelled": lambda options: synthetic.modelled(options.synthetic)},
    "repeated_documents": {
        "modelled": lambda options: repeated_documents.requests_of(options.repeated_documents, _output(options))
    },
    "forked_sequence": {
        "modelled": lambda options: forked_sequence.requests_of(options.forked_sequence, _output(options))
    },
    "alias_questions": {
        "modelled": lambda options: alias_questions.requests_of(
            options.alias_questions, queries.tokenizer_of(options.text.tokenizer), _output(options)
        )
    },
    "tokenised": {"local": _text(tokenised.local)},
    "queries": {"local": lambda options: queries.local(options.text, options.selection)},
}
# Their prompts are many parts, of which none is the document that a limit could cut.
UNCUT = {
    "rag": "workload.rag.k to set the length",
    "ragpulse": "no limit on recorded prompts",
    "repeated_documents": "workload.repeated_documents.document_tokens to set the length",
    "alias_questions": "workload.alias_questions.words to set the length",
    "forked_sequence": "workload.forked_sequence.prompt_tokens to set the length",
    "queries": "no limit on queries as they are written",
}


def load_workload(
    kind: str,
    source: str | None = None,
    *,
    path: str | Path | None = None,
    queries_path: str | Path | None = None,
    tokenizer: str | Path | None = None,
    cache_dir: str | Path | None = None,
    documents: int | None = None,
    questions_per_document: int | None = None,
    max_prompt_tokens: int | None = None,
    too_long: Literal["cut", "drop"] = "cut",
    output_tokens: int | None = None,
    vocab_fold: int | None = None,
    queries_per_prompt: int | None = None,
    synthetic: SyntheticOptions | None = None,
    rag: RagOptions | None = None,
    ragpulse: RagPulseOptions | None = None,
    repeated_documents: RepeatedDocuments | None = None,
    forked_sequence: ForkedSequence | None = None,
    alias_questions: AliasQuestions | None = None,
) -> Workload:
    """Build a workload; `source` None takes the kind's default.

    `cache_dir` None tokenises anew each time. Raises SourceUnavailable if the text cannot be had and ValueError for
    settings that make no sense; nothing is ever replaced by something else.
    """
    selection = Selection(documents, questions_per_document, max_prompt_tokens, too_long, output_tokens)
    text = TextOptions(_path(path), _path(queries_path), tokenizer, _path(cache_dir), queries_per_prompt, vocab_fold)
    reader, chosen = _reader(kind, source)
    _refuse_ignored(kind, chosen, text)
    if kind in UNCUT and max_prompt_tokens is not None:
        raise ValueError(f"workload.max_prompt_tokens={max_prompt_tokens} with {kind}; expected {UNCUT[kind]}")
    options = SourceOptions(text, synthetic or SyntheticOptions(), ragpulse or RagPulseOptions(), selection=selection)
    own = {
        "repeated_documents": repeated_documents,
        "forked_sequence": forked_sequence,
        "alias_questions": alias_questions,
    }
    corpus = reader(replace(options, **{key: value for key, value in own.items() if value is not None}))
    if isinstance(corpus, Workload):
        return corpus
    if kind != "rag":
        return select(corpus, selection)
    # Retrieval draws from the selected documents only, so they are selected before it and not after.
    drawn = drawn_requests(corpus, selection, rag or RagOptions())
    return select(drawn, replace(selection, documents=None, questions_per_document=None))


def _reader(kind: str, source: str | None) -> tuple[Reader, str]:
    if kind not in SOURCES:
        raise ValueError(f"workload.kind={kind}; expected one of {', '.join(SOURCES)}")
    readers = SOURCES[kind]
    chosen = source or next(iter(readers))
    if chosen not in readers:
        raise ValueError(f"workload.source={chosen} does not exist for {kind}; expected one of {', '.join(readers)}")
    return readers[chosen], chosen


def _refuse_ignored(kind: str, source: str, text: TextOptions) -> None:
    """A setting that would change nothing is a mistake, not a wish."""
    if text.path is not None and source not in ("local", "shape"):
        raise ValueError(f"workload.path={text.path} is not read by workload.source={source}; expected source=local")
    if text.queries_per_prompt is not None and (kind, source) != ("system_prompts", "local"):
        raise ValueError(
            f"workload.queries_per_prompt={text.queries_per_prompt} is not read by {kind} from {source}; "
            f"expected kind=system_prompts with source=local"
        )
    if text.queries_path is not None and (kind, source) != ("system_prompts", "local"):
        raise ValueError(
            f"workload.queries_path={text.queries_path} is not read by {kind} from {source}; "
            f"expected kind=system_prompts with source=local"
        )
    if text.vocab_fold is not None and kind != "tokenised":
        raise ValueError(f"workload.vocab_fold={text.vocab_fold} is not read by {kind}; expected kind=tokenised")
    if text.vocab_fold is not None and text.vocab_fold < 1:
        raise ValueError(f"workload.vocab_fold={text.vocab_fold}; expected a vocabulary size from 1 up")


def _output(options: SourceOptions) -> int:
    """Output tokens of requests that have no answer of their own."""
    return options.selection.output_tokens or 1


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
