"""Which requests are asked, and from where they come: the settings of a workload, and the workload itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spanlab.checks import REQUIRED, not_negative, one_of, positive
from spanlab.workloads import (
    conversation,
    designed_shapes,
    log,
    narrativeqa,
    quality,
    queries,
    system_prompts,
    tokenised,
)
from spanlab.workloads.alias_questions import AliasQuestions
from spanlab.workloads.arrangement import Arrangement, arranged, with_independent_documents
from spanlab.workloads.chat_sessions import ChatSessions
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.forked_sequence import ForkedSequence
from spanlab.workloads.joints import Joints
from spanlab.workloads.logs import LogSettings
from spanlab.workloads.preamble import Preamble, with_preambles
from spanlab.workloads.preamble_text import preamble_writer
from spanlab.workloads.questions import Questions
from spanlab.workloads.rag import Rag
from spanlab.workloads.ragpulse import RagPulse
from spanlab.workloads.repeated_documents import RepeatedDocuments
from spanlab.workloads.selection import TOO_LONG, Selection, select
from spanlab.workloads.source import WORKLOADS, kinds, sources
from spanlab.workloads.synthetic import Synthetic
from spanlab.workloads.tokenizer import find_tokenizer
from spanlab.workloads.workload import Workload

#: Modules whose functions are workloads; the others are imported for their settings.
READERS = (conversation, designed_shapes, log, narrativeqa, quality, queries, system_prompts, tokenised)
FILES = ("path", "queries_path", "cache_dir")
OTHERS = ("tokenizer", "vocab_fold", "queries_per_prompt")
#: Kinds whose prompts are complete, since a file or a design says all of them.
COMPLETE = (
    "queries",
    "designed_shapes",
    "repeated_documents",
    "forked_sequence",
    "alias_questions",
    "log",
    "chat_sessions",
    "questions",
)
OWN = (
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
#: Kinds that are made up, or measured, where no file is named, and local where one is.
MAYBE_LOCAL = ("log", "questions")


@dataclass
class Popularity:
    """How often each document is asked about.

    `requests`  requests to draw; null: every question once
    `zipf`      exponent of the documents' popularity; 0: all alike
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
    """Which requests are asked, and from where they come; docs/workloads.md describes kinds and sources.

    `kind`                    the workload
    `source`                  shape: measured lengths; local: a file; hub: a data set; modelled: made up; null: the
                              first of these that the kind has
    `path`                    file or folder; local text, or what make_shape wrote (source=shape)
    `name`                    what `path` holds, for tables and figures; null: the name of its format
    `queries_path`            user queries; system_prompts from local text only
    `tokenizer`               tokenizer.json, its folder, a packaged model, or a hub name; text only
    `cache_dir`               folder for tokenised text; text only
    `documents`               first documents to take; null: all
    `questions_per_document`  first questions of each document to take; null: all
    `max_prompt_tokens`       longest prompt; null: no limit
    `too_long`                cut the document's end, or drop the document
    `output_tokens`           output tokens per request; null: as the source says
    `vocab_fold`              token ids modulo this number; tokenised only
    `queries_per_prompt`      user queries for each local system prompt; null: 30, or as many as there are
    `documents_per_prompt`    documents of each prompt: the question's own, the others of those served drawn at random
    `documents_order`         shuffled for each prompt, fixed as in the workload, own_first or own_last; null: shuffled
    `documents_independent`   whether a document may be reused wherever it stands; null: as the workload says, true of
                              several documents
    `question_position`       after the documents, or before them
    `preamble`                what stands before the rest of each prompt
    `popularity`              how often each document is asked about
    `synthetic`               options of kind=synthetic
    `chat_sessions`           options of kind=chat_sessions
    `repeated_documents`      options of kind=repeated_documents
    `forked_sequence`         options of kind=forked_sequence
    `alias_questions`         options of kind=alias_questions
    `questions`               options of kind=questions
    `rag`                     options of kind=rag
    `ragpulse`                options of kind=ragpulse
    `log`                     how a log is read; kind=log
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
        usual = "local" if self.kind in MAYBE_LOCAL and self.path is not None else sources(self.kind)[0]
        self.source = self.source or usual
        one_of("workload.source", self.source, sources(self.kind))
        one_of("workload.too_long", self.too_long, TOO_LONG)
        positive("workload.vocab_fold", self.vocab_fold)
        positive("workload.queries_per_prompt", self.queries_per_prompt)
        chosen = f"kind={self.kind}, source={self.source}"
        WORKLOADS.check("workload", self.reader, self.keys, self.options, chosen)
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
        assert self.selection is not None, "it checks what it is made of"

    def _check_prompts(self) -> None:
        """Refuse preambles and arrangements that the workload cannot have, and stamps that would not be different."""
        changed = [] if self.arrangement.is_plain else [self.arrangement.key()]
        if self.documents_independent is not None:
            changed += [f"workload.documents_independent={str(self.documents_independent).lower()}"]
            if self.documents_per_prompt > 1:
                raise ValueError(
                    f"{changed[-1]} with {self.arrangement.key()}: expected null, for they are independent"
                )
        changed += [] if self.preamble.is_absent else [f"workload.preamble.none.share={self.preamble.none.share:g}"]
        if changed and self.kind in COMPLETE:
            raise ValueError(
                f"{changed[0]} with workload.kind={self.kind}: expected its default, for these prompts are complete"
            )
        for name, texts in self.preamble.texts().items():
            if texts.text is not None and self.tokenizer is None:
                raise ValueError(
                    f"workload.preamble.{name}.text with workload.tokenizer=null: expected null, or a text source"
                )
        if self.popularity.requests is not None and self.preamble.request.share:
            raise ValueError(
                f"workload.preamble.request.share={self.preamble.request.share:g} with workload.popularity.requests="
                f"{self.popularity.requests}: expected 0, for a request that is drawn again would have the same one"
            )

    @property
    def reader(self) -> str:
        """The name under which what reads or makes the requests is registered."""
        return f"{self.kind}/{self.source}"

    @property
    def keys(self) -> dict[str, Any]:
        """Options that have keys of their own; files as paths."""
        paths = {key: None if getattr(self, key) is None else Path(getattr(self, key)) for key in FILES}
        return paths | {key: getattr(self, key) for key in (*OTHERS, *OWN)}

    @property
    def arrangement(self) -> Arrangement:
        """The documents of a prompt and the place of its question."""
        return Arrangement(self.documents_per_prompt, self.documents_order, self.question_position)

    @property
    def selection(self) -> Selection:
        """Which of the requests are served."""
        return Selection(
            self.documents, self.questions_per_document, self.max_prompt_tokens, self.too_long, self.output_tokens
        )


def load_workload(settings: WorkloadSettings, cache_dir: Path | None = None) -> Workload:
    """The requests of a workload and what they really are.

    `cache_dir`  for tokenised text, where the settings name no folder; None tokenises anew each time.

    Raises SourceUnavailable if the text cannot be had and ValueError for settings that make no sense; nothing is ever
    replaced by something else.
    """
    reader, keys = settings.reader, settings.keys
    if WORKLOADS.takes(reader, "cache_dir"):
        keys["cache_dir"] = keys["cache_dir"] or cache_dir
    found = WORKLOADS.make(reader, keys, settings.options, selection=_leaving_room(settings, Joints()))
    if not WORKLOADS.takes(reader, "selection") and isinstance(found, Workload):
        refuse_selection(settings)
    found = _with_prompts(found, settings)
    return found if settings.name is None else found.called(settings.name)


def _with_prompts(found: Corpus | Workload, settings: WorkloadSettings) -> Workload:
    """The selected requests with their documents and questions arranged, behind their preambles."""
    arrangement, joints = settings.arrangement, Joints()
    if isinstance(found, Corpus):
        if found.joints is not None and not arrangement.is_plain:
            joints = found.joints()
        found = select(found, _leaving_room(settings, joints))
    write = None
    if settings.tokenizer is not None and not settings.preamble.is_absent:
        write = preamble_writer(find_tokenizer(settings.tokenizer))
    found = with_independent_documents(arranged(found, arrangement, joints), settings.documents_independent)
    return with_preambles(found, settings.preamble, write)


def _leaving_room(settings: WorkloadSettings, joints: Joints) -> Selection:
    """What is served, with as much less room as preamble and joints take."""
    selection, arrangement = settings.selection, settings.arrangement
    selection = replace(selection, documents_per_prompt=arrangement.documents)
    added = settings.preamble.longest + arrangement.joining_tokens(joints)
    limit = selection.max_prompt_tokens
    if limit is None:
        return selection
    if limit <= added:
        raise ValueError(f"workload.max_prompt_tokens={limit}: expected more than {added}, for preamble and joints")
    return replace(selection, max_prompt_tokens=limit - added)


def refuse_selection(settings: WorkloadSettings) -> None:
    """Refuse keys that select requests, where a workload makes them itself."""
    usual = asdict(Selection())
    for key, value in asdict(settings.selection).items():
        if value != usual[key]:
            made = f"workload.kind={settings.kind}, which makes its requests itself"
            raise ValueError(f"workload.{key}={value} with {made}: expected {usual[key]}")
