"""What is asked, where it comes from, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanlab.checks import REQUIRED, not_negative, one_of, positive
from spanlab.workloads.alias_questions import AliasQuestions
from spanlab.workloads.forked_sequence import ForkedSequence
from spanlab.workloads.repeated_documents import RepeatedDocuments
from spanlab_sim.arrivals import ARRIVALS, ORDERS

WORKLOADS = (
    "quality",
    "narrativeqa",
    "system_prompts",
    "rag",
    "ragpulse",
    "synthetic",
    "tokenised",
    "queries",
    "designed_shapes",
    "repeated_documents",
    "forked_sequence",
    "alias_questions",
)
TEXTLESS = ("tokenised", "ragpulse")
OWN_OPTIONS = ("synthetic", "rag", "ragpulse", "repeated_documents", "forked_sequence", "alias_questions")


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
class Overlap:
    """The shared prefix of a synthetic group.

    `groups`              groups of requests
    `requests_per_group`  requests of each group
    `prompt_tokens`       length of every prompt
    `kind`                distribution of the overlap: uniform, normal or fixed
    `unit`                of the overlap: fraction of the prompt, or tokens
    `value`               the overlap; fixed only
    `low`                 least overlap; uniform only
    `high`                largest overlap; uniform only
    `mean`                mean overlap; normal only
    `sd`                  its standard deviation; normal only
    `seed`                of the draws
    """

    groups: int = 48
    requests_per_group: int = 16
    prompt_tokens: int = 4096
    kind: str = "uniform"
    unit: str = "fraction"
    value: float = 0.8
    low: float = 0.5
    high: float = 0.95
    mean: float = 0.8
    sd: float = 0.1
    seed: int = 0


@dataclass
class Rag:
    """A modelled retriever: `k` passages for each question, documents and passages by Zipf popularity.

    `k`              passages per question
    `requests`       requests to draw by popularity; null: every question once
    `zipf`           exponent of the documents' popularity
    `passage_zipf`   exponent of the passages' popularity within a document
    `noise`          share of passages that come from anywhere in the corpus
    `order`          of passages in a prompt: shuffled, ranked or fixed
    `system_tokens`  length of the system prompt; null: as it is
    `seed`           of the draws
    """

    k: int = 6
    requests: int | None = None
    zipf: float = 1.0
    passage_zipf: float = 1.0
    noise: float = 0.2
    order: str = "shuffled"
    system_tokens: int | None = None
    seed: int = 0


@dataclass
class RagPulse:
    """The RAGPulse trace: its first `requests`, at the recorded gaps, or stretched to `rate_rps`, or `speedup` faster.

    `requests`     the first requests of the trace; null: all
    `rate_rps`     mean rate to stretch the recorded gaps to; null: as recorded
    `speedup`      factor by which the gaps shrink
    `independent`  which components are independent spans: passages (with history and web pages), or all
    """

    requests: int | None = None
    rate_rps: float | None = None
    speedup: float = 1.0
    independent: str = "passages"


@dataclass
class WorkloadSettings:
    """Which requests are asked, and from where they come; docs/workloads.md describes kinds and sources.

    `kind`                    the workload
    `source`                  shape: measured lengths; local: a file; hub: a data set; modelled: synthetic only
    `path`                    file or folder; local text, or what make_shape wrote (source=shape)
    `name`                    what `path` holds, for tables and figures; null: the name of its format
    `queries_path`            user queries; system_prompts from local text only
    `tokenizer`               tokenizer.json, its folder, or a hub name; text only
    `cache_dir`               folder for tokenised text; text only
    `documents`               first documents to take; null: all
    `questions_per_document`  first questions of each document to take; null: all
    `max_prompt_tokens`       longest prompt; null: no limit
    `too_long`                cut the document's end, or drop the document
    `output_tokens`           output tokens per request; null: as the source says
    `vocab_fold`              token ids modulo this number; tokenised only
    `queries_per_prompt`      user queries for each local system prompt; null: 30, or as many as there are
    `popularity`              how often each document is asked about
    `synthetic`               options of kind=synthetic
    `repeated_documents`      options of kind=repeated_documents
    `forked_sequence`         options of kind=forked_sequence
    `alias_questions`         options of kind=alias_questions
    `rag`                     options of kind=rag
    `ragpulse`                options of kind=ragpulse
    """

    kind: str = REQUIRED
    source: str = "shape"
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
    popularity: Popularity = field(default_factory=Popularity)
    synthetic: Overlap | None = None
    repeated_documents: RepeatedDocuments | None = None
    forked_sequence: ForkedSequence | None = None
    alias_questions: AliasQuestions | None = None
    rag: Rag | None = None
    ragpulse: RagPulse | None = None

    def __post_init__(self) -> None:
        one_of("workload.kind", self.kind, WORKLOADS)
        one_of("workload.source", self.source, ("shape", "local", "hub", "modelled"))
        one_of("workload.too_long", self.too_long, ("cut", "drop"))
        for key in (
            "documents",
            "questions_per_document",
            "max_prompt_tokens",
            "output_tokens",
            "vocab_fold",
            "queries_per_prompt",
        ):
            positive(f"workload.{key}", getattr(self, key))
        for key in OWN_OPTIONS:
            if (self.kind == key) != (getattr(self, key) is not None):
                raise ValueError(f"workload.{key} with workload.kind={self.kind}: expected both or neither {key}")
        if self.kind in ("rag", "ragpulse") and self.popularity.requests is not None:
            raise ValueError(
                f"workload.popularity.requests={self.popularity.requests} with workload.kind={self.kind}: "
                f"expected workload.{self.kind}.requests"
            )
        if self.source == "local" and self.path is None:
            raise ValueError("workload.source=local needs workload.path: expected a file or folder")
        text = (self.source in ("local", "hub") and self.kind not in TEXTLESS) or self.kind == "alias_questions"
        for key in ("tokenizer", "cache_dir"):
            if getattr(self, key) is not None and not text:
                raise ValueError(
                    f"workload.{key}={getattr(self, key)} with workload.source={self.source}: no text to tokenise"
                )
        if self.kind == "queries" and self.cache_dir is not None:
            raise ValueError(f"workload.cache_dir={self.cache_dir} with workload.kind=queries: nothing of it is kept")
        measured = self.source == "shape" and self.path is not None and Path(self.path).suffix in ("", ".npz")
        own = self.source == "local" or measured
        if self.name is not None and not own:
            raise ValueError(f"workload.name={self.name} with workload.source={self.source}: expected source=local")
        if self.path is not None and not own:
            raise ValueError(f"workload.path={self.path} with workload.source={self.source}: expected source=local")


@dataclass
class ArrivalSettings:
    """When requests arrive.

    `kind`        the arrival process
    `rate_rps`    mean requests per second: of the whole system, or of each group for poisson_per_group
    `burstiness`  shape of gamma; the squared coefficient of variation of the gaps is 1 / burstiness
    `order`       of requests: shuffled, or as_given by the workload; poisson, gamma, deterministic and saturating only
    `clients`     most requests in flight: a further one arrives when one of them finishes; closed_loop only
    `options`     options of an arrival process from a plugin, by name
    """

    kind: str = "poisson"
    rate_rps: float | None = None
    burstiness: float | None = None
    order: str | None = None
    clients: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("arrivals.kind", self.kind, ARRIVALS)
        positive("arrivals.rate_rps", self.rate_rps)
        positive("arrivals.clients", self.clients)
        positive("arrivals.burstiness", self.burstiness)
        if self.order is not None:
            one_of("arrivals.order", self.order, ORDERS)
        ARRIVALS.check("arrivals", self.kind, self.keys, self.options)

    @property
    def keys(self) -> dict[str, Any]:
        """Options that have keys of their own."""
        return {"rate_rps": self.rate_rps, "burstiness": self.burstiness, "order": self.order, "clients": self.clients}
