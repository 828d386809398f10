"""Bodies of calls to an OpenAI-compatible server, with outputs of an exact length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spanlab.checks import one_of
from spanlab.core.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Form of a prompt: token ids or text for completions, or one user message for chat completions.
PROMPTS = ("tokens", "text", "messages")


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


def check_prompts(path: str, prompts: str, tokenizer: str | None) -> None:
    """Reject text prompts without a tokenizer, and an unused tokenizer; both keys are under `path`."""
    one_of(f"{path}.prompts", prompts, PROMPTS)
    if tokenizer is None and prompts != "tokens":
        raise ValueError(f"{path}.prompts={prompts}: expected {path}.tokenizer too, a tokenizer.json or its folder")
    if tokenizer is not None and prompts == "tokens":
        raise ValueError(f"{path}.tokenizer={tokenizer} with {path}.prompts=tokens: expected null, or text or messages")
