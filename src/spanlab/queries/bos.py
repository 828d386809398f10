"""The BOS token: added if the tokenizer requires it and the template omits it; an error inside the prompt."""

from __future__ import annotations

import numpy as np

from spanlab.core.request import Tokens
from spanlab.queries.template import ChatTemplate
from spanlab.queries.tokenizer import ChatTokenizer

# No two adjacent messages have the same role, since some templates reject that.
_ROLES = ("user", "assistant", "user")


def missing_bos(first: int | None, tokenizer: ChatTokenizer) -> Tokens:
    """The BOS id that the tokenizer adds, unless the template already wrote it as token `first`: one id or none."""
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return np.array([] if bos is None or first == bos else [bos], dtype=np.int32)


def check_bos(tokens: Tokens, tokenizer: ChatTokenizer) -> None:
    """Raise ValueError for a BOS inside the prompt, which would act as a second attention sink."""
    # If BOS and EOS are the same token, an occurrence inside the prompt may be an EOS.
    if tokenizer.bos_token is None or tokenizer.bos_token == tokenizer.eos_token:
        return
    repeated = np.flatnonzero(tokens[1:] == tokenizer.bos_id) + 1
    if len(repeated) and opens_messages(tokenizer.template, tokenizer.bos_token):
        repeated = repeated[tokens[repeated - 1] == tokenizer.bos_id]
    if len(repeated):
        raise ValueError(
            f"the chat template of {tokenizer.name} writes {tokenizer.bos_token} inside the prompt, at token"
            f" {repeated[0]}; expected one at the beginning and none elsewhere, or one before every message"
        )


def opens_messages(template: ChatTemplate, bos: str) -> bool:
    """Whether the template opens every message with the BOS, as SmolLM2's does with <|im_start|>."""
    *openings, closing = template.gaps(_ROLES, open_turn=False)
    return bos not in closing and all(bos in opening for opening in openings)
