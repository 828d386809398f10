"""Toy tokenizers for toy texts."""

import re
from pathlib import Path

MARKS = ("<|im_start|>", "<|im_end|>")
#: Words and signs of our prompt layouts.
LAYOUT = (
    "You read an article and answer a multiple choice question about it Reply with the line of right option a story "
    "in few words system user assistant Article Story Question Answer User Assistant A B C D "
    ". , : - < | > _ im_start im_end"
)


def save_word_tokenizer(path: Path, *texts: str, marks: bool = True) -> Path:
    """Write a word-level tokenizer with every word of our layouts and of `texts`; returns the path."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = dict.fromkeys(re.findall(r"\w+|[^\w\s]", " ".join((LAYOUT, *texts))))
    vocabulary = {"[UNK]": 0} | {word: number for number, word in enumerate(words, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if marks:
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(path))
    return path
