"""How a prompt is cut into what is stored: under which key a stretch of tokens lies, and in which context it is made.

A prefix cache has one cache span, the whole prompt. Position-independent caching has one for every independent span and
one for every run of ordered text between them. A cache span's KV is a function of its own tokens and of
what they were computed to see, whose digest is its *parent hash*; equal tokens with equal parent hashes are the same
entry, and different parent hashes never meet. That one rule says both that a document is found wherever it stands and
that the text behind it is not shared with another prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from spanlab.core.request import Request
from spanlab.core.token_string import TokenString, string_of


class CacheSpan(NamedTuple):
    """Prompt tokens `[start, stop)`, stored as one entry.

    `independent`  a span that promises not to care what stands before it; else ordered text
    `tokens`       their ids
    `parent_hash`  digest of what their KV depends on besides themselves; empty where that is nothing
    `context`      how many tokens of the prompt's beginning they are computed to see; `start` is everything before
    `exact`        what is found under this key is what computing it here would give, in full view of the prompt
    `storable`     False where their KV depends on more than tokens, so that it must not be found
    """

    start: int
    stop: int
    independent: bool
    tokens: TokenString
    parent_hash: bytes
    context: int
    exact: bool = True
    storable: bool = True


Layout = Callable[[Request], tuple[CacheSpan, ...]]


class Stretch(NamedTuple):
    """An independent span, or all ordered text up to the next one."""

    start: int
    stop: int
    independent: bool
    tokens: TokenString


def stretches(request: Request) -> list[Stretch]:
    """The prompt's independent spans and the runs of ordered text between them, without empty ones.

    The last token is always ordered: whatever it belongs to, the answer starts from it and must see the whole prompt.
    """
    parts = [(span.independent, string_of([span.tokens])) for span in request.spans if len(span.tokens)]
    if parts and parts[-1][0]:
        tokens = parts.pop()[1]
        last = len(tokens) - 1
        parts += [(True, tokens.cut(0, last)), (False, tokens.cut(last, last + 1))]
    found: list[Stretch] = []
    position = 0
    for independent, tokens in parts:
        start, position = position, position + len(tokens)
        if found and not (independent or found[-1].independent):
            start, tokens = found[-1].start, found.pop().tokens + tokens
        if len(tokens):
            found.append(Stretch(start, position, independent, tokens))
    return found


def whole(request: Request) -> tuple[CacheSpan, ...]:
    """One cache span: prefix caching."""
    tokens = request.string
    return (CacheSpan(0, len(tokens), False, tokens, b"", 0),)


def isolated(request: Request) -> tuple[CacheSpan, ...]:
    """Independent spans are computed alone, as if each were a prompt of its own; ordered text sees all before it."""
    return _cut(request, b"", 0)


def conditioned(request: Request) -> tuple[CacheSpan, ...]:
    """Independent spans see the ordered text that the prompt begins with, not each other (APE, arXiv 2502.05431)."""
    head = next(iter(stretches(request)), None)
    if head is None or head.independent:
        return isolated(request)
    return _cut(request, blake2b(head.tokens.tobytes(), digest_size=16).digest(), head.stop)


def _cut(request: Request, shared: bytes, seen: int) -> tuple[CacheSpan, ...]:
    """Cache spans whose independent spans have the parent hash `shared` and see the prompt's first `seen` tokens.

    The parent hash of ordered text is of all before it, with the boundaries: the same words cut otherwise are other KV.
    """
    cache_spans, before = [], blake2b(shared, digest_size=16)
    for start, stop, independent, tokens in stretches(request):
        if independent:
            cache_spans.append(CacheSpan(start, stop, True, tokens, shared, seen, exact=start == seen))
        else:
            cache_spans.append(CacheSpan(start, stop, False, tokens, before.digest() if start else b"", start))
        before.update(b"%d,%d:" % (independent, stop - start))
        before.update(tokens.tobytes())
    return tuple(cache_spans)


def composable(request: Request) -> tuple[CacheSpan, ...]:
    """As `isolated`, for models with recurrent layers: a span leaves a map of the state, text leaves states.

    Spans have a parent hash of their own, so that a document that begins a prompt as ordered text is another entry.
    """
    return _cut(request, b"span", 0)


def as_seen(request: Request) -> tuple[CacheSpan, ...]:
    """Independent spans are kept as they were first computed, with whatever stood before them (LMCache's chunks).

    They have a parent hash of their own, so no other layout finds them. What stands behind one depends on a donor that
    no token names, and is not stored; it has a parent hash of its own too, or a document of the same words would be
    taken for it.
    """
    cache_spans: list[CacheSpan] = []
    for start, stop, independent, tokens in stretches(request):
        parent_hash = b"as seen" if independent else b"behind" if start else b""
        storable = independent or not start
        cache_spans.append(CacheSpan(start, stop, independent, tokens, parent_hash, start, not independent, storable))
    return tuple(cache_spans)


def repeats(cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
    """Spans that an earlier one of the same prompt equals in tokens and parent hash: index of each, and of the first.

    Only spans whose KV follows from those two: what is kept as it was first seen is another KV at another place.
    """
    first: dict[tuple[bytes, TokenString], int] = {}
    found = {}
    for at, cache_span in enumerate(cache_spans):
        alone = cache_span.exact or cache_span.context < cache_span.start
        if cache_span.independent and cache_span.storable and alone:
            one = first.setdefault((cache_span.parent_hash, cache_span.tokens), at)
            if one != at:
                found[at] = one
    return found


def without_tails(layout: Layout) -> Layout:
    """The same layout, but text behind a span is not stored: for repairs whose choice no parent hash names.

    Such text has seen rows that another request, with the same parent hash, would have computed elsewhere.
    """

    def cut(request: Request) -> tuple[CacheSpan, ...]:
        cache_spans = layout(request)
        first = next((at for at, cache_span in enumerate(cache_spans) if cache_span.independent), len(cache_spans))
        behind = (
            cache_span if cache_span.independent else cache_span._replace(storable=False)
            for cache_span in cache_spans[first:]
        )
        return (*cache_spans[:first], *behind)

    return cut


LAYOUTS: dict[str, Layout] = {"whole": whole, "isolated": isolated, "conditioned": conditioned, "as_seen": as_seen}
