"""Making of the committed shapes from texts that are not shipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanlab.registry import REQUIRED, entry
from spanlab.workloads import ragpulse
from spanlab.workloads.chats import read_trace
from spanlab.workloads.files import existing_file, file_sha256
from spanlab.workloads.rag import local_passages
from spanlab.workloads.reading import local_quality, local_system_prompts, model
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import JOINTS, Shape, measure, save
from spanlab.workloads.text import LAYOUT_VERSION, TokenizerFile, find_tokenizer
from spanlab.workloads.workload import SOURCES, Corpus, ProvenanceKind


@dataclass(frozen=True, slots=True)
class Inputs:
    """Input files of a shape; `questions` and `words` are for the modelled NarrativeQA only."""

    path: Path
    tokenizer: TokenizerFile
    tokenizer_from: str | Path | None
    queries: Path | None = None
    questions: Path | None = None
    words: Path | None = None
    cache_dir: Path | None = None

    @property
    def text(self) -> tuple[Path, str | Path | None, Path | None]:
        """Arguments of a text reader: text, tokenizer, and cache folder."""
        return self.path, self.tokenizer_from, self.cache_dir

    def metadata(self) -> dict[str, Any]:
        """Return metadata with the hash of each input; files are named without their folders."""
        paths = [
            file
            for file in (self.path, self.queries, self.questions, self.words)
            if file is not None
        ]
        files = [
            existing_file(file, "workload.path", "a file, so that its content can be named")
            for file in paths
        ]
        return {
            "inputs": {file.name: file_sha256(file) for file in files},
            "tokenizer": {"name": self.tokenizer.name, "sha256": self.tokenizer.sha256},
            "layout": LAYOUT_VERSION,
        }


def make_shape(
    kind: str,
    path: str | Path,
    tokenizer: str | Path | None,
    out: str | Path,
    *,
    queries_path: str | Path | None = None,
    questions_path: str | Path | None = None,
    words_path: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Measure or model the shape of `kind` and write it to `out`, a file or a folder that gets
    `<kind>.npz`.

    quality, rag: `path` is a QuALITY jsonl. ragpulse: `path` is the trace's folder; conversation:
    the trace's file. For both traces, `tokenizer` is None. system_prompts: `path` is a Parquet file
    of token ids, `queries_path` a jsonl of queries. narrativeqa: `path` is documents.csv,
    `questions_path` the FairytaleQA jsonl, `words_path` the QuALITY jsonl whose articles give the
    tokens per word.
    """
    if kind not in (*MAKERS, *TRACES):
        expected = ", ".join((*MAKERS, *TRACES))
        raise ValueError(f"workload.kind={kind} has no shape to make; expected one of {expected}")
    target = Path(out) if Path(out).suffix == ".npz" else Path(out) / f"{kind}.npz"
    if kind in TRACES:
        if tokenizer is not None:
            raise ValueError(
                f"workload.tokenizer={tokenizer} is not read for {kind}; expected none, as it has no text"
            )
        return save(TRACES[kind](Path(path), "measured shape"), target)
    paths = (
        None if p is None else Path(p)
        for p in (queries_path, questions_path, words_path, cache_dir)
    )
    inputs = Inputs(Path(path), find_tokenizer(tokenizer), tokenizer, *paths)
    return save(MAKERS[kind](inputs), target)


def _measured(corpus: Corpus, inputs: Inputs) -> Shape:
    everything = select(corpus, Selection(unknown_output=0))
    joints = {} if corpus.joints is None else {JOINTS: corpus.joints().counts()}
    return measure(
        everything, kind="measured shape", detail=corpus.detail, **inputs.metadata(), **joints
    )


def _modelled(inputs: Inputs) -> Shape:
    shape = model(inputs.path, inputs.questions, inputs.words, inputs.tokenizer)
    return replace(shape, meta=shape.meta | inputs.metadata())


MAKERS: dict[str, Callable[[Inputs], Shape]] = {
    "quality": lambda inputs: _measured(local_quality(*inputs.text), inputs),
    "system_prompts": lambda inputs: _measured(
        local_system_prompts(inputs.path, inputs.queries, *inputs.text[1:]), inputs
    ),
    "narrativeqa": _modelled,
    "rag": lambda inputs: _measured(local_passages(*inputs.text), inputs),
}
TRACES: dict[str, Callable[[Path, ProvenanceKind], Shape]] = {
    "ragpulse": ragpulse.read_trace,
    "conversation": read_trace,
}


@dataclass
class MakeShape:
    """Measure the shape of a workload from its text, and write the shape without the text.

    `kind`            as `workload.kind`
    `path`            the text: file or folder
    `out`             the shape: a file, or a folder for NAME.npz
    `tokenizer`       a tokenizer.json or its folder; null for a trace
    `queries_path`    user queries; system_prompts only
    `questions_path`  table of questions; narrativeqa only
    `words_path`      table of document lengths; narrativeqa only
    """

    kind: str = REQUIRED
    path: str = REQUIRED
    out: str = REQUIRED
    tokenizer: str | None = None
    queries_path: str | None = None
    questions_path: str | None = None
    words_path: str | None = None

    def __post_init__(self) -> None:
        local = f"{self.kind}/local"
        if self.tokenizer is None and (local not in SOURCES or SOURCES.takes(local, "tokenizer")):
            raise ValueError(
                f"tokenizer is not set with kind={self.kind}: expected a tokenizer.json, or its folder"
            )


@entry("make_shape", MakeShape)
def run_make_shape(settings: MakeShape, run: str, root: Path) -> None:
    """Write the shape, and print its path."""
    print(make_shape(**vars(settings)))
