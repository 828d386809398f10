"""Output formats of workloads: block hashes, load generators and bodies of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from spanlab.core.request import Request
from spanlab.registry import Registry, positive
from spanlab.workloads.logs.formats import BLOCKS
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.workload import PROMPTS, check_prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ------------------------------------------------------------------------------
# Registry of output formats of workloads; each format is registered by its module.
# ------------------------------------------------------------------------------

Line = dict[str, Any]
#: Converts requests in order of arrival to one JSON object each, in which numpy arrays are lists.
Writer = Callable[[Iterable[Request]], Iterator[Line]]

#: A registered function returns the writer; its parameters are keys of `writer`.
WRITERS: Registry[Writer] = Registry("writer")
#: Formats without tokens: equal numbers mean equal blocks, and say nothing about their content.
HASHED = ("aiperf", "dynamo", "guidellm", "mooncake", "weka")
BlockSize = Annotated[int, positive, "tokens per block"]


# ------------------------------------------------------------------------------
# Traces of prompts as chained block ids: an id identifies the tokens of a block and its whole
# prefix.
# ------------------------------------------------------------------------------


class BlockIds:
    """Block numbers in order of first appearance; equal numbers mean equal prompts up to the block's end.

    A partial last block has a separate number, so that a number always stands for the same number of tokens.
    """

    def __init__(self, size: int) -> None:
        if size not in BLOCKS:
            sizes = ", ".join(map(str, sorted(BLOCKS)))
            raise ValueError(f"writer.block_size={size}: expected one of {sizes}, the sizes that log readers recognise")
        self._size = size
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._salts: dict[str, int] = {}

    def of(self, request: Request) -> list[int]:
        """Return the block numbers of a prompt; requests with different salts share no blocks."""
        tokens, numbers = request.string, []
        parent = -1 - self._salts.setdefault(request.cache_salt, len(self._salts))
        for start in range(0, len(tokens), self._size):
            block = parent, tokens.key(start, self._size)
            parent = self._numbers.setdefault(block, len(self._numbers))
            numbers.append(parent)
        return numbers

    def fresh(self, tokens: int) -> list[int]:
        """Return numbers of the blocks of tokens that no other prompt has."""
        first = len(self._numbers)
        for number in range(first, first - (-tokens // self._size)):
            self._numbers[number, b"fresh"] = number
        return [*range(first, len(self._numbers))]


def block_trace(block_size: int, timestamp: Callable[[Request], float]) -> Writer:
    """Return a writer of Mooncake's fields; `timestamp` returns the arrival in the trace's unit of time."""
    ids = BlockIds(block_size)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "timestamp": timestamp(request),
                "input_length": request.num_tokens,
                "output_length": request.output_len,
                "hash_ids": ids.of(request),
            }

    return write


# ------------------------------------------------------------------------------
# Bodies of calls to an OpenAI-compatible server, with outputs of an exact length.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bodies:
    """Writer of request bodies for a model of a server.

    `tokenizer`  decodes prompts to text; None if and only if prompts are token ids
    `exact`      requests outputs of an exact length, with parameters that vLLM and SGLang add to OpenAI's
    """

    model: str | None
    prompts: str
    tokenizer: Tokenizer | None = None
    exact: bool = True

    @property
    def call(self) -> str:
        """The API call of the bodies: the path after /v1/."""
        return "chat/completions" if self.prompts == "messages" else "completions"

    def body(self, request: Request) -> dict[str, Any]:
        """Return prompt and output limits, for `orjson.OPT_SERIALIZE_NUMPY`; `cache_salt` is a parameter of vLLM."""
        body = {**self._prompt(request), "max_tokens": request.output_len, "temperature": 0.0}
        if self.exact:
            body |= {"min_tokens": request.output_len, "ignore_eos": True}
        if self.model is not None:
            body["model"] = self.model
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return body

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self.tokenizer is None:
            return {"prompt": request.tokens}
        text = self.tokenizer.decode(request.tokens.tolist(), skip_special_tokens=False)
        return {"messages": [{"role": "user", "content": text}]} if self.prompts == "messages" else {"prompt": text}


# ------------------------------------------------------------------------------
# A trace for guidellm's replay profile: kind=mooncake reads its blocks, kind=trace_synthetic
# only its lengths.
# ------------------------------------------------------------------------------


@WRITERS.register("guidellm")
def guidellm(block_size: BlockSize = 512) -> Writer:
    """Write a Mooncake trace with `timestamp` in seconds, as guidellm reads it."""
    return block_trace(block_size, lambda request: request.arrived_at / 1e9)


# ------------------------------------------------------------------------------
# Mooncake trace, which AIPerf, Dynamo and SGLang replay as a timed trace: milliseconds,
# lengths, block ids.
# ------------------------------------------------------------------------------

_NS_PER_MS = 1_000_000


@WRITERS.register("mooncake")
def mooncake(block_size: BlockSize = 512) -> Writer:
    """Write `timestamp` in milliseconds, as an integer if exact, and no sessions, because readers continue them."""
    return block_trace(block_size, _milliseconds)


def _milliseconds(request: Request) -> float:
    milliseconds, remainder = divmod(request.arrived_at, _NS_PER_MS)
    return request.arrived_at / _NS_PER_MS if remainder else milliseconds


# ------------------------------------------------------------------------------
# Requests to an OpenAI-compatible server as lines of a batch file, with their times.
# ------------------------------------------------------------------------------


@WRITERS.register("openai")
def openai(
    served_model: Annotated[str | None, "name of the model in each request"] = None,
    prompts: Annotated[str, PROMPTS, "tokens: ids; text; messages: one message of a user"] = "tokens",
    tokenizer: Annotated[str | None, "decodes prompts: tokenizer.json, its folder, or a hub name"] = None,
) -> Writer:
    """Write the call as `body`, with `timestamp` in seconds, `session_id` and `output_length` as further fields."""
    check_prompts("writer", prompts, tokenizer)
    bodies = Bodies(served_model, prompts, None if tokenizer is None else find_tokenizer(tokenizer).tokenizer)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "custom_id": f"request-{request.id}",
                "method": "POST",
                "url": f"/v1/{bodies.call}",
                "body": bodies.body(request),
                "timestamp": request.arrived_at / 1e9,
                "session_id": request.group_id,
                "output_length": request.output_len,
            }

    return write
