"""The token that begins a text: added where tokenizer and template leave it out, refused where it stands twice."""

from __future__ import annotations

import numpy as np

from spanlab.core.request import Tokens
from spanlab.queries.template import ChatTemplate
from spanlab.queries.tokenizer import ChatTokenizer

# No role stands beside its like, since some templates refuse that.
_ROLES = ("user", "assistant", "user")


def missing_bos(first: int | None, tokenizer: ChatTokenizer) -> Tokens:
    """The BOS that the tokenizer asks for and the template did not write before token `first`: one id or none."""
    asked = tokenizer.bos_id if tokenizer.adds_bos else None
    return np.array([] if asked is None or first == asked else [asked], dtype=np.int32)


def check_bos(tokens: Tokens, tokenizer: ChatTokenizer) -> None:
    """Refuse a prompt that begins a second time inside, which makes a false sink of whatever follows."""
    # Where one token begins and ends texts, its place cannot tell which of the two is meant.
    if tokenizer.bos_token is None or tokenizer.bos_token == tokenizer.eos_token:
        return
    again = np.flatnonzero(tokens[1:] == tokenizer.bos_id) + 1
    if len(again) and opens_messages(tokenizer.template, tokenizer.bos_token):
        again = again[tokens[again - 1] == tokenizer.bos_id]
    if len(again):
        raise ValueError(
            f"the chat template of {tokenizer.name} writes {tokenizer.bos_token} inside the prompt, at token"
            f" {again[0]}; expected one at the beginning and none elsewhere, or one before every message"
        )


def opens_messages(template: ChatTemplate, bos: str) -> bool:
    """Whether the template opens every message with the BOS, as SmolLM2's does with <|im_start|>."""
    *openings, closing = template.gaps(_ROLES, open_turn=False)
    return bos not in closing and all(bos in opening for opening in openings)
