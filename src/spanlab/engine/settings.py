"""Settings of `backend=engine`: model, device and recorded outputs. Imported by `settings`, so
without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.request import Request
from spanlab.core.token_string import Tokens
from spanlab.model_spec import ModelSpec
from spanlab.registry import not_negative, one_of, positive

WEIGHTS = ("random", "hub", "path", "package")
CLOCKS = ("virtual", "wall")
RECORDS = ("nothing", "tokens", "first_logits", "logits", "scores")
BASELINE, GOLD = TEACHERS = ("baseline", "gold")
DECODES = PLAIN, PADDED, GRAPHS = ("plain", "padded", "graphs")
PREFILLS = PLAIN, GRAPHS
DTYPES = {2: "bfloat16", 4: "float32"}


class MissingBaselineError(Exception):
    """A run needs logits of the baseline that the baseline's run has not computed."""


@dataclass
class EngineSettings:
    """The model that `backend=engine` runs; its sizes are those of the study's `model`, and are
    checked against it.

    `name`         a choice of conf/model, a config.json or its folder, for random weights; a
                   repository, with weights=hub; a packaged model, with weights=package; the study's
                   `model.name` where null
    `weights`      random (for timing), hub, path, or package: of a model that an installed package
                   holds
    `path`         folder of the model as transformers saves it; weights=path only
    `device`       cpu, cuda or cuda:N; auto: cuda if there is one, else cpu
    `seed`         of random weights, which also depend on the device, and of sampling
    `temperature`  0 is greedy
    `threads`      threads of torch on the CPU; null: torch's choice
    `decode`       how steps are launched in which every request decodes: plain; padded, to powers
                   of two of requests and spans; graphs, padded and replayed as CUDA graphs
    `prefill`      how all other steps are launched: plain; graphs, with up to 512 rows padded to a
                   multiple of 64, and what lies between attentions and recurrent layers replayed as
                   CUDA graphs
    `clock`        virtual: steps last as measured and idle time is skipped; wall: requests arrive
                   in real time
    `alternate`    arms take turns, request by request where one client sends them: each serves
                   until no request is in flight, so that drift of the machine affects all arms
                   alike; the caches of all arms are in memory at the same time
    `record`       what a run keeps of its outputs: nothing, tokens, first_logits (of each request),
                   logits (of all), or scores of gold answers: log-probabilities, and the distance
                   from the baseline's logits
    `teacher`      whose answers all arms are given token by token (teacher forcing): baseline, what
                   the baseline has chosen; gold, the first gold answer; null: each arm chooses its
                   own
    """

    name: str | None = None
    weights: str = "random"
    path: str | None = None
    device: str = "auto"
    seed: int = 0
    temperature: float = 0.0
    threads: int | None = None
    decode: str = PLAIN
    prefill: str = PLAIN
    clock: str = "virtual"
    alternate: bool = False
    record: str = "nothing"
    teacher: str | None = None

    def __post_init__(self) -> None:
        one_of("engine.weights", self.weights, WEIGHTS)
        not_negative("engine.seed", self.seed)
        one_of("engine.decode", self.decode, DECODES)
        if self.decode == GRAPHS and self.device == "cpu":
            raise ValueError(
                f"engine.decode={self.decode} with engine.device=cpu: expected plain or padded"
            )
        one_of("engine.prefill", self.prefill, PREFILLS)
        if self.prefill == GRAPHS and self.device == "cpu":
            raise ValueError(
                f"engine.prefill={self.prefill} with engine.device=cpu: expected plain"
            )
        one_of("engine.clock", self.clock, CLOCKS)
        one_of("engine.record", self.record, RECORDS)
        if self.teacher is not None:
            one_of("engine.teacher", self.teacher, TEACHERS)
        pair = f"engine.teacher={self.teacher} with engine.record={self.record}"
        if self.teacher == BASELINE and self.record == "nothing":
            raise ValueError(f"{pair}: expected tokens or logits")
        if self.teacher == GOLD and self.record not in ("logits", "scores"):
            raise ValueError(f"{pair}: expected logits or scores")
        if self.teacher != GOLD and self.record == "scores":
            raise ValueError(f"{pair}: expected engine.teacher=gold")
        if self.alternate and self.clock == "wall":
            raise ValueError(
                f"engine.alternate=true with engine.clock={self.clock}: expected virtual"
            )
        if self.alternate and self.teacher == BASELINE:
            raise ValueError(
                f"engine.alternate=true with engine.teacher={self.teacher}: expected gold or null"
            )
        not_negative("engine.temperature", self.temperature)
        positive("engine.threads", self.threads)
        if (self.path is not None) != (self.weights == "path"):
            raise ValueError(
                f"engine.path={self.path} with engine.weights={self.weights}: expected both or neither path"
            )


def reads_baseline(engine: EngineSettings) -> bool:
    """Whether runs read the answers or logits of the baseline's run."""
    return engine.teacher == BASELINE or engine.record == "scores"


def dtype_of(model: ModelSpec) -> str:
    """The data type that a model runs in, by the bytes per weight; ValueError if the engine
    supports none."""
    if model.weight_itemsize not in DTYPES:
        raise ValueError(
            f"model.weight_itemsize={model.weight_itemsize}: expected 2 or 4, the bytes of numbers that the engine has"
        )
    return DTYPES[model.weight_itemsize]


# ------------------------------------------------------------------------------
# Mapping of a workload's token ids into a model's vocabulary.
# ------------------------------------------------------------------------------

# 2^64 / golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def remap_tokens(requests: Sequence[Request], vocab_size: int) -> list[Request]:
    """Return the requests with ids in [0, vocab_size); unchanged if all ids are already in range.

    Workloads from measured shapes number their tokens consecutively, so a plain remainder would
    give unrelated texts equal sequences; ids are hashed first. Equal ids stay equal, and spans that
    share an array still share one. Known outputs and options are mapped too.
    """
    spans = {id(span): span for request in requests for span in request.spans}
    texts = [
        *(span.tokens for span in spans.values()),
        *(request.output for request in requests if request.output is not None),
    ]
    texts += [option for request in requests for option in request.options]
    if all(len(tokens) == 0 or tokens.max() < vocab_size for tokens in texts):
        return list(requests)
    mapped = {
        key: replace(span, ids=_map_ids(span.tokens, vocab_size)) for key, span in spans.items()
    }
    outputs = [
        None if request.output is None else _map_ids(request.output, vocab_size)
        for request in requests
    ]
    return [
        replace(
            request,
            spans=tuple(mapped[id(span)] for span in request.spans),
            output=output,
            options=tuple(_map_ids(option, vocab_size) for option in request.options),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def _map_ids(tokens: Tokens, vocab_size: int) -> Tokens:
    scattered = (tokens.astype(np.uint64) * _SPREAD) >> np.uint64(32)
    return (scattered % np.uint64(vocab_size)).astype(np.int32)
