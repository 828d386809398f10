"""Sentences of a Markdown page."""

import re

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_WORDS = 20


def sentences(markdown: str) -> list[str]:
    """Return the sentences without code blocks, tables and the targets of links."""
    text = re.sub(r"<!--.*?-->|^\|.*$", "", FENCE.sub("", markdown), flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n|\n(?=- |#)", text)]
    return [part for each in paragraphs if each for part in re.split(r"(?<=[.?!])[*)]*\s+", each)]


def long_sentences(markdown: str) -> list[str]:
    """Return the sentences of more than `MOST_WORDS` words."""
    return [each for each in sentences(markdown) if len(re.findall(r"\w\S*", each)) > MOST_WORDS]
