"""Settings of a workload, and the function that loads its requests.

A kind of workload is a dataclass next to the functions that read it, its sources. It extends the
classes below whose keys mean something for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from functools import reduce
from inspect import getdoc
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from spanlab.kinds import Kind, Kinds, check_fields, default_of, field
from spanlab.registry import REQUIRED, file_of, not_negative, one_of, positive
from spanlab.workloads.preamble import Preamble, preamble_writer, with_preambles
from spanlab.workloads.selection import (
    ORDERS,
    POSITIONS,
    TOO_LONG,
    Arrangement,
    Selection,
    arranged,
    select,
    with_independent_documents,
)
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.workload import SOURCES, Corpus, Joints, Workload, sources


@dataclass
class Popularity:
    """How often each document is requested."""

    requests: int | None = field(None, positive, "requests to draw; null: every question once")
    zipf: float = field(0.0, not_negative, "exponent of the documents' popularity; 0: uniform")

    def __post_init__(self) -> None:
        check_fields(self, "workload.popularity")
        if self.zipf and self.requests is None:
            raise ValueError(
                "workload.popularity.zipf is set: expected workload.popularity.requests too"
            )


# ------------------------------------------------------------------------------
# Keys of all kinds, and keys that several kinds share.
# ------------------------------------------------------------------------------


@dataclass
class WorkloadSettings(Kind):
    """The requests of a study: one of the kinds, each with keys of its own; docs/workloads.md
    describes them."""

    source: str | None = field(
        None,
        None,
        "shape: measured lengths; local: a file; hub: a data set; modelled: synthetic; null: local for a `path` that "
        "the first source does not read, else the first that the kind has",
    )

    #: Values of keys that a kind need not have.
    popularity = Popularity()
    preamble = Preamble()

    def __post_init__(self) -> None:
        check_fields(self, "workload")
        names = sources(self.kind)
        reading = [name for name in names if SOURCES.takes(f"{self.kind}/{name}", "path")]
        self.source = self.source or (reading if reading and self.path is not None else names)[0]
        one_of("workload.source", str(self.source), names)
        # keys that are set, and that this source does not read but another source of the kind
        others = {}
        for key in fields(self):
            kinds = [f"{self.kind}/{name}" for name in names]
            readers = [reader for reader in kinds if SOURCES.takes(reader, key.name)]
            value = getattr(self, key.name)
            if readers and self.reader not in readers and value != default_of(key):
                others[key.name] = value
        chosen = f"workload.kind={self.kind}, source={self.source}"
        SOURCES.check("workload.options", self.reader, chosen, {}, self.arguments() | others)
        assert self.arrangement is not None, "the constructor of Arrangement checks its values"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the reader: required ones, and those that are not the default."""
        keys, arguments = {key.name: key for key in fields(self)}, {}
        for option in fields(SOURCES.schema(self.reader)):
            value, types = getattr(self, option.name), _types(option.type)
            if default_of(option) == REQUIRED or value != default_of(keys[option.name]):
                is_file = isinstance(value, str) and Path in types and str not in types
                arguments[option.name] = Path(value) if is_file else value
        return arguments

    @property
    def reader(self) -> str:
        """Name of the registered function that reads or makes the requests: kind/source."""
        return f"{self.kind}/{self.source}"

    @property
    def arrangement(self) -> Arrangement:
        """Number and order of a prompt's documents, and the position of its question."""
        return Arrangement()

    @property
    def selection(self) -> Selection:
        """Rules that select the served requests."""
        readable = {key.name for key in fields(self) if not SOURCES.takes(self.reader, key.name)}
        return Selection(
            **{
                key.name: getattr(self, key.name)
                for key in fields(Selection)
                if key.name in readable
            }
        )

    @property
    def path(self) -> str | None:
        """File or folder of a kind that reads one."""
        return None

    @property
    def name(self) -> str | None:
        """Name of the data in `path`."""
        return None

    @property
    def tokenizer(self) -> str | None:
        """Tokenizer of a kind that reads text."""
        return None

    @property
    def documents_independent(self) -> bool | None:
        """Whether the documents of a kind that has some may be reused at any position; None: as it
        says."""
        return None

    @property
    def embeds(self) -> bool:
        """Whether a model computes embeddings of its texts."""
        return False

    def pace(self) -> dict[str, float]:
        """Return the keys that change recorded arrival times, where they are set."""
        return {}


class _Workloads(Kinds[WorkloadSettings]):
    """Kinds of workloads: those with a class, and those of functions alone, whose parameters are
    their keys.

    Parameters of a source that the class of its kind has no key for are further keys of the kind.
    """

    def __init__(self) -> None:
        super().__init__("workload", WorkloadSettings)
        self._made: dict[str, tuple[object, type[WorkloadSettings]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*super().__iter__(), *(name.partition("/")[0] for name in SOURCES)}))

    def __contains__(self, name: str) -> bool:
        return name in list(self)

    def __getitem__(self, name: str) -> Callable[..., WorkloadSettings]:
        one_of(self._what, name, self)
        declared: Any = super().__getitem__(name) if super().__contains__(name) else OfFunction
        readers = [SOURCES[f"{name}/{source}"] for source in sources(name)]
        if name not in self._made or self._made[name][0] != (declared, readers):
            self._made[name] = (declared, readers), _with_parameters(name, declared)
        return self._made[name][1]


WORKLOADS = _Workloads()


@dataclass
class OfFile(WorkloadSettings):
    """A workload that is read from a file or folder."""

    path: str | None = field(
        None, None, "file or folder: local text, or a shape that make_shape wrote (source=shape)"
    )
    name: str | None = field(
        None,
        None,
        "name of the data in `path`, for tables and figures; null: the name of its format",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.path is None:
            raise ValueError(
                f"workload.name={self.name} with workload.path=null: expected workload.path"
            )


@dataclass
class OfText(WorkloadSettings):
    """A workload whose texts become token ids."""

    tokenizer: str | None = field(
        None, None, "tokenizer.json, its folder, a packaged model, or a hub name; text only"
    )


@dataclass
class OfTextFile(OfText, OfFile):
    """A workload of texts from files that take long to tokenise."""

    cache_dir: str | None = field(None, None, "folder for tokenised text; text only")


@dataclass
class WithOutput(WorkloadSettings):
    """A workload whose output lengths may be set."""

    output_tokens: int | None = field(
        None, positive, "output tokens per request; null: as in the source"
    )


@dataclass
class Selected(WithOutput):
    """A workload of which the first documents may be taken."""

    documents: int | None = field(None, positive, "first documents to take; null: all")
    questions_per_document: int | None = field(
        None, positive, "first questions of each document to take; null: all"
    )


@dataclass
class Limited(Selected):
    """A workload whose prompts may be limited."""

    max_prompt_tokens: int | None = field(None, positive, "longest prompt; null: no limit")


@dataclass
class Cut(Limited):
    """A workload whose documents may be cut."""

    too_long: str = field("cut", TOO_LONG, "cut the document's end, or drop the document")


@dataclass
class WithPreamble(WorkloadSettings):
    """A workload whose prompts a file or a design does not determine completely."""

    preamble: Preamble = field(Preamble, None, "text before the rest of each prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass
class Arranged(WithPreamble):
    """A workload of prompts with one document and a question, which may get another order and more
    documents."""

    documents_per_prompt: int = field(
        1,
        None,
        "documents of each prompt: the question's document, and others served, drawn at random",
    )
    documents_order: str | None = field(
        None,
        tuple(ORDERS),
        "shuffled for each prompt, fixed as in the workload, own_first or own_last; null: shuffled",
    )
    documents_independent: bool | None = field(
        None,
        None,
        "whether a document may be reused at any position; null: as the workload says, true for several documents",
    )
    question_position: str = field("after", POSITIONS, "after the documents, or before them")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.documents_independent is not None and self.documents_per_prompt > 1:
            raise ValueError(
                f"workload.documents_independent={str(self.documents_independent).lower()} with "
                f"{self.arrangement.key()}: expected null, as several documents are independent"
            )

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.documents_per_prompt, self.documents_order, self.question_position)


@dataclass
class Drawn(WorkloadSettings):
    """A workload whose requests may be drawn by popularity in each run."""

    popularity: Popularity = field(Popularity, None, "how often each document is requested")


# ------------------------------------------------------------------------------
# Kinds of functions without a class, as of plugins.
# ------------------------------------------------------------------------------


@dataclass
class OfFunction(Drawn, Arranged, Cut):
    """A workload of a function; its parameters are keys."""


def _with_parameters(name: str, declared: type[WorkloadSettings]) -> type[WorkloadSettings]:
    """Return the class of a kind with a key for each parameter of its sources that it has no key
    for."""
    options = {
        key.name: key
        for source in sources(name)
        for key in fields(SOURCES.schema(f"{name}/{source}"))
    }
    bases = (declared, OfFile) if declared is OfFunction and "path" in options else (declared,)
    known = {key.name for base in bases for key in fields(base)}
    keys = []
    for option in options.values():
        if option.name in known:
            continue
        # files are text in settings
        types = [str if kind is Path else kind for kind in _types(option.type)]
        default = default_of(option)
        if default == REQUIRED:
            types, default = [*types, NoneType], None  # `SOURCES.check` requires a value
        meaning = option.metadata["meaning"] or "option of its function"
        key = field(default, option.metadata["check"], meaning)
        keys.append((option.name, reduce(or_, types), key))
    if not keys and declared is not OfFunction:
        return declared
    reader = SOURCES[f"{name}/{sources(name)[0]}"]
    if not {"kind", "source"}.isdisjoint(options):
        raise ValueError(
            f"{file_of(reader)}: {reader.__name__}: expected other names of options than kind and source"
        )
    text = {
        "__doc__": getdoc(reader) if declared is OfFunction else declared.__doc__,
        "__reduce__": lambda settings: (_restored, (settings.kind, vars(settings))),
    }
    return make_dataclass(
        name, [*keys, ("kind", str, field(name, None, "the kind"))], bases=bases, namespace=text
    )


def _types(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is UnionType else (hint,)


def _restored(kind: str, values: dict[str, Any]) -> WorkloadSettings:
    """Return settings of a made class, which pickle does not find by its name."""
    made: Any = WORKLOADS[kind]
    settings: WorkloadSettings = object.__new__(made)
    vars(settings).update(values)
    return settings


# ------------------------------------------------------------------------------
# Loading.
# ------------------------------------------------------------------------------


def load_workload(settings: WorkloadSettings, cache_dir: Path | None = None) -> Workload:
    """Load the requests of a workload with their provenance.

    `cache_dir`  folder for tokenised text if the settings name none; None tokenises the text on
                 each call.

    Raises SourceUnavailable if the text is not available, and ValueError for invalid settings.
    There is no fallback to another source.
    """
    arguments = settings.arguments()
    if SOURCES.takes(settings.reader, "cache_dir") and cache_dir is not None:
        arguments.setdefault("cache_dir", cache_dir)
    selection = _reserve_tokens(settings, Joints())
    source = SOURCES.make(settings.reader, {}, arguments, selection=selection)
    if not SOURCES.takes(settings.reader, "selection") and isinstance(source, Workload):
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
    source = with_independent_documents(
        arranged(source, arrangement, joints), settings.documents_independent
    )
    source = with_preambles(source, settings.preamble, write)
    return source if settings.name is None else source.with_name(settings.name)


def _reserve_tokens(settings: WorkloadSettings, joints: Joints) -> Selection:
    """Return the selection with the length limit reduced by the tokens of preamble and joints."""
    selection = settings.selection
    added = settings.preamble.longest + settings.arrangement.joining_tokens(joints)
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
    defaults = asdict(Selection(documents_per_prompt=settings.arrangement.documents))
    for key, value in asdict(settings.selection).items():
        if value != defaults[key]:
            chosen_kind = f"workload.kind={settings.kind}, which makes its requests itself"
            raise ValueError(f"workload.{key}={value} with {chosen_kind}: expected {defaults[key]}")
