"""A tokenizer built in code, for machines without tokenizer files: invented words, bytes and ChatML."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from spanlab.queries.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_WORDS = 2000
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ROLE_WORDS = ("system", "user", "assistant")
_SYLLABLES = tuple(map("".join, product("bdfgklmnprstvz", "aeiou")))
# Coprime to the number of syllables, so that the sequence of three-syllable words has no repetition.
_STRIDE = 104_729


def invented_words() -> tuple[str, ...]:
    """The NUM_WORDS words of the vocabulary, three syllables each, identical on every machine."""
    count = len(_SYLLABLES)
    numbers = ((index * _STRIDE) % count**3 for index in range(1, NUM_WORDS + 1))
    return tuple(_SYLLABLES[n // count**2] + _SYLLABLES[n // count % count] + _SYLLABLES[n % count] for n in numbers)


def builtin_tokenizer() -> ChatTokenizer:
    """One token for each invented word, with or without a space before it, and one for each byte of all other text.

    Ids: 256 bytes, then the words and the names of the roles, each in both forms, then the special tokens; ChatML as
    the chat template; no BOS. Decoding restores every text exactly.
    """
    return ChatTokenizer("builtin", _tokenizer(), CHATML, eos_token="<|im_end|>")


def _tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    word_tokens = (form for word in (*_ROLE_WORDS, *invented_words()) for form in (word, space + word))
    vocabulary = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *word_tokens)
    # Without merges, text is encoded as bytes, except for words that `ignore_merges` finds in the vocabulary.
    model = models.BPE({token: number for number, token in enumerate(vocabulary)}, [], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return tokenizer
