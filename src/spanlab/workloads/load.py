"""Settings of a workload, and the function that loads its requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spanlab.registry import REQUIRED, not_negative, one_of, positive
from spanlab.workloads import chats, queries, reading, synthetic
from spanlab.workloads.alias import AliasQuestions
from spanlab.workloads.chats import ChatSessions
from spanlab.workloads.logs import read
from spanlab.workloads.logs.read import LogSettings
from spanlab.workloads.preamble import Preamble, preamble_writer, with_preambles
from spanlab.workloads.questions import Questions
from spanlab.workloads.rag import Rag
from spanlab.workloads.ragpulse import RagPulse
from spanlab.workloads.selection import TOO_LONG, Arrangement, Selection, arranged, select, with_independent_documents
from spanlab.workloads.synthetic import ForkedSequence, RepeatedDocuments, Synthetic
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.workload import WORKLOADS, Corpus, Joints, Workload, kinds, sources

#: Modules whose functions are workloads; the others are imported for their settings.
READERS = (chats, read, queries, reading, synthetic)
PATH_KEYS = ("path", "queries_path", "cache_dir")
SCALAR_KEYS = ("tokenizer", "vocab_fold", "queries_per_prompt")
#: Kinds whose prompts are complete: a file or a design determines every span.
COMPLETE_KINDS = (
    "queries",
    "designed_shapes",
    "repeated_documents",
    "forked_sequence",
    "alias_questions",
    "log",
    "chat_sessions",
    "questions",
)
KIND_OPTIONS = (
    "synthetic",
    "chat_sessions",
    "repeated_documents",
    "forked_sequence",
    "alias_questions",
    "questions",
    "rag",
    "ragpulse",
    "log",
)
#: Kinds with a synthetic or measured default source, which become local if `path` is set.
OPTIONAL_PATH_KINDS = ("log", "questions")


@dataclass
class Popularity:
    """How often each document is requested.

    `requests`  requests to draw; null: every question once
    `zipf`      exponent of the documents' popularity; 0: uniform
    """

    requests: int | None = None
    zipf: float = 0.0

    def __post_init__(self) -> None:
        positive("workload.popularity.requests", self.requests)
        not_negative("workload.popularity.zipf", self.zipf)
        if self.zipf and self.requests is None:
            raise ValueError("workload.popularity.zipf is set: expected workload.popularity.requests too")


@dataclass
class WorkloadSettings:
    """Requests of a study and their source; docs/workloads.md describes kinds and sources.

    `kind`                    the workload
    `source`                  shape: measured lengths; local: a file; hub: a data set; modelled: synthetic; null: the
                              first of these that the kind has
    `path`                    file or folder: local text, or a shape that make_shape wrote (source=shape)
    `name`                    name of the data in `path`, for tables and figures; null: the name of its format
    `queries_path`            user queries; system_prompts from local text only
    `tokenizer`               tokenizer.json, its folder, a packaged model, or a hub name; text only
    `cache_dir`               folder for tokenised text; text only
    `documents`               first documents to take; null: all
    `questions_per_document`  first questions of each document to take; null: all
    `max_prompt_tokens`       longest prompt; null: no limit
    `too_long`                cut the document's end, or drop the document
    `output_tokens`           output tokens per request; null: as in the source
    `vocab_fold`              token ids modulo this number; tokenised only
    `queries_per_prompt`      user queries for each local system prompt; null: 30, or all if there are fewer
    `documents_per_prompt`    documents of each prompt: the question's document, and others served, drawn at random
    `documents_order`         shuffled for each prompt, fixed as in the workload, own_first or own_last; null: shuffled
    `documents_independent`   whether a document may be reused at any position; null: as the workload says, true for
                              several documents
    `question_position`       after the documents, or before them
    `preamble`                text before the rest of each prompt
    `popularity`              how often each document is requested
    `synthetic`               options of kind=synthetic
    `chat_sessions`           options of kind=chat_sessions
    `repeated_documents`      options of kind=repeated_documents
    `forked_sequence`         options of kind=forked_sequence
    `alias_questions`         options of kind=alias_questions
    `questions`               options of kind=questions
    `rag`                     options of kind=rag
    `ragpulse`                options of kind=ragpulse
    `log`                     options of kind=log
    `options`                 options of a workload from a plugin, by name
    """

    kind: str = REQUIRED
    source: str | None = None
    path: str | None = None
    name: str | None = None
    queries_path: str | None = None
    tokenizer: str | None = None
    cache_dir: str | None = None
    documents: int | None = None
    questions_per_document: int | None = None
    max_prompt_tokens: int | None = None
    too_long: str = "cut"
    output_tokens: int | None = None
    vocab_fold: int | None = None
    queries_per_prompt: int | None = None
    documents_per_prompt: int = 1
    documents_order: str | None = None
    documents_independent: bool | None = None
    question_position: str = "after"
    preamble: Preamble = field(default_factory=Preamble)
    popularity: Popularity = field(default_factory=Popularity)
    synthetic: Synthetic | None = None
    chat_sessions: ChatSessions | None = None
    repeated_documents: RepeatedDocuments | None = None
    forked_sequence: ForkedSequence | None = None
    alias_questions: AliasQuestions | None = None
    questions: Questions | None = None
    rag: Rag | None = None
    ragpulse: RagPulse | None = None
    log: LogSettings | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("workload.kind", self.kind, kinds())
        default_source = (
            "local" if self.kind in OPTIONAL_PATH_KINDS and self.path is not None else sources(self.kind)[0]
        )
        self.source = self.source or default_source
        one_of("workload.source", self.source, sources(self.kind))
        one_of("workload.too_long", self.too_long, TOO_LONG)
        positive("workload.vocab_fold", self.vocab_fold)
        positive("workload.queries_per_prompt", self.queries_per_prompt)
        chosen = f"workload.kind={self.kind}, source={self.source}"
        WORKLOADS.check("workload.options", self.reader, chosen, self.options, self.keys)
        if self.questions is not None:
            self.questions.check(self.path)
        if self.kind in ("rag", "ragpulse", "questions") and self.popularity.requests is not None:
            raise ValueError(
                f"workload.popularity.requests={self.popularity.requests} with workload.kind={self.kind}: "
                f"expected workload.{self.kind}.requests"
            )
        if self.name is not None and self.path is None:
            raise ValueError(f"workload.name={self.name} with workload.path=null: expected workload.path")
        self._check_prompts()
        assert self.selection is not None, "the constructor of Selection checks its values"

    def _check_prompts(self) -> None:
        """Reject preambles and arrangements that the workload does not support.

        Also reject a preamble per request with repeated requests, which would repeat the preamble too.
        """
        changed_keys = [] if self.arrangement.is_plain else [self.arrangement.key()]
        if self.documents_independent is not None:
            changed_keys += [f"workload.documents_independent={str(self.documents_independent).lower()}"]
            if self.documents_per_prompt > 1:
                raise ValueError(
                    f"{changed_keys[-1]} with {self.arrangement.key()}: expected null, as several documents are "
                    "independent"
                )
        changed_keys += (
            [] if self.preamble.is_absent else [f"workload.preamble.none.share={self.preamble.none.share:g}"]
        )
        if changed_keys and self.kind in COMPLETE_KINDS:
            raise ValueError(
                f"{changed_keys[0]} with workload.kind={self.kind}: expected its default, because its "
                "prompts are complete"
            )
        for name, texts in self.preamble.texts().items():
            if texts.text is not None and self.tokenizer is None:
                raise ValueError(
                    f"workload.preamble.{name}.text with workload.tokenizer=null: expected null, or a text source"
                )
        if self.popularity.requests is not None and self.preamble.request.share:
            raise ValueError(
                f"workload.preamble.request.share={self.preamble.request.share:g} with workload.popularity.requests="
                f"{self.popularity.requests}: expected 0, because a repeated request repeats its preamble"
            )

    @property
    def reader(self) -> str:
        """Name of the registered function that reads or makes the requests: kind/source."""
        return f"{self.kind}/{self.source}"

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of the workload; files as paths."""
        paths = {key: None if getattr(self, key) is None else Path(getattr(self, key)) for key in PATH_KEYS}
        return paths | {key: getattr(self, key) for key in (*SCALAR_KEYS, *KIND_OPTIONS)}

    @property
    def arrangement(self) -> Arrangement:
        """Number and order of a prompt's documents, and the position of its question."""
        return Arrangement(self.documents_per_prompt, self.documents_order, self.question_position)

    @property
    def selection(self) -> Selection:
        """Rules that select the served requests."""
        return Selection(
            self.documents, self.questions_per_document, self.max_prompt_tokens, self.too_long, self.output_tokens
        )


def load_workload(settings: WorkloadSettings, cache_dir: Path | None = None) -> Workload:
    """Load the requests of a workload with their provenance.

    `cache_dir`  folder for tokenised text if the settings name none; None tokenises the text on each call.

    Raises SourceUnavailable if the text is not available, and ValueError for invalid settings.
    There is no fallback to another source.
    """
    reader, keys = settings.reader, settings.keys
    if WORKLOADS.takes(reader, "cache_dir"):
        keys["cache_dir"] = keys["cache_dir"] or cache_dir
    source = WORKLOADS.make(reader, keys, settings.options, selection=_reserve_tokens(settings, Joints()))
    if not WORKLOADS.takes(reader, "selection") and isinstance(source, Workload):
        refuse_selection(settings)
    # the selected requests with arranged documents and questions and with preambles
    arrangement, joints = settings.arrangement, Joints()
    if isinstance(source, Corpus):
        if source.joints is not None and not arrangement.is_plain:
            joints = source.joints()
        source = select(source, _reserve_tokens(settings, joints))
    write = None
    if settings.tokenizer is not None and not settings.preamble.is_absent:
        write = preamble_writer(find_tokenizer(settings.tokenizer))
    source = with_independent_documents(arranged(source, arrangement, joints), settings.documents_independent)
    source = with_preambles(source, settings.preamble, write)
    return source if settings.name is None else source.with_name(settings.name)


def _reserve_tokens(settings: WorkloadSettings, joints: Joints) -> Selection:
    """Return the selection with the length limit reduced by the tokens of preamble and joints."""
    selection, arrangement = settings.selection, settings.arrangement
    selection = replace(selection, documents_per_prompt=arrangement.documents)
    added = settings.preamble.longest + arrangement.joining_tokens(joints)
    limit = selection.max_prompt_tokens
    if limit is None:
        return selection
    if limit <= added:
        raise ValueError(
            f"workload.max_prompt_tokens={limit}: expected more than {added}, the tokens of preamble and joints"
        )
    return replace(selection, max_prompt_tokens=limit - added)


def refuse_selection(settings: WorkloadSettings) -> None:
    """Reject selection keys for a workload that selects or makes its requests itself."""
    defaults = asdict(Selection())
    for key, value in asdict(settings.selection).items():
        if value != defaults[key]:
            chosen_kind = f"workload.kind={settings.kind}, which makes its requests itself"
            raise ValueError(f"workload.{key}={value} with {chosen_kind}: expected {defaults[key]}")
