"""The cache spans of a prompt: the key of each stored entry, and the context in which its KV is computed.

A prefix cache has one cache span, the whole prompt. Position-independent caching has one for every independent span
and one for every run of ordered text between them. The KV of a cache span is a function of its tokens and of the
context that they attend to. The digest of this context is the *parent hash*. Cache spans with equal tokens and equal
parent hashes are the same entry; entries with different parent hashes are never shared. So a document is reused
wherever it stands, and the text behind it is not shared with another prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from spanlab.core.request import Request
from spanlab.core.token_string import TokenString, string_of


class CacheSpan(NamedTuple):
    """Prompt tokens `[start, stop)`, stored as one entry.

    `independent`  a span that the workload marks as independent of the text before it; else ordered text
    `tokens`       their ids
    `parent_hash`  digest of the context that their KV depends on; empty without such a context
    `context`      number of tokens from the prompt's beginning that they attend to; `start`: all tokens before them
    `exact`        the entry under this key equals what computing it here, in full view of the prompt, would give
    `storable`     False where their KV depends on more than tokens, so that it must not be matched
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


class TokenRun(NamedTuple):
    """An independent span, or all ordered text up to the next one."""

    start: int
    stop: int
    independent: bool
    tokens: TokenString


def token_runs(request: Request) -> list[TokenRun]:
    """Return the prompt's independent spans and the runs of ordered text between them, without empty ones.

    The last token is always ordered text: the output starts from it, so it must attend to the whole prompt.
    """
    parts = [(span.independent, string_of([span.tokens])) for span in request.spans if len(span.tokens)]
    if parts and parts[-1][0]:
        tokens = parts.pop()[1]
        last = len(tokens) - 1
        parts += [(True, tokens.cut(0, last)), (False, tokens.cut(last, last + 1))]
    runs: list[TokenRun] = []
    position = 0
    for independent, tokens in parts:
        start, position = position, position + len(tokens)
        if runs and not (independent or runs[-1].independent):
            start, tokens = runs[-1].start, runs.pop().tokens + tokens
        if len(tokens):
            runs.append(TokenRun(start, position, independent, tokens))
    return runs


def whole(request: Request) -> tuple[CacheSpan, ...]:
    """Return one cache span for the whole prompt: prefix caching."""
    tokens = request.string
    return (CacheSpan(0, len(tokens), False, tokens, b"", 0),)


def isolated(request: Request) -> tuple[CacheSpan, ...]:
    """Compute independent spans alone, each like a prompt; ordered text attends to all tokens before it."""
    return _cut_prompt(request, b"", 0)


def conditioned(request: Request) -> tuple[CacheSpan, ...]:
    """Let independent spans attend to the prompt's opening text, not to each other (APE, arXiv 2502.05431)."""
    head = next(iter(token_runs(request)), None)
    if head is None or head.independent:
        return isolated(request)
    return _cut_prompt(request, blake2b(head.tokens.tobytes(), digest_size=16).digest(), head.stop)


def _cut_prompt(request: Request, parent_hash: bytes, context: int) -> tuple[CacheSpan, ...]:
    """Return cache spans; independent ones have the hash `parent_hash` and attend to `context` tokens.

    The parent hash of ordered text covers all text before it and its span boundaries: with other boundaries, the same
    tokens have other KV.
    """
    cache_spans, before = [], blake2b(parent_hash, digest_size=16)
    for start, stop, independent, tokens in token_runs(request):
        if independent:
            cache_spans.append(CacheSpan(start, stop, True, tokens, parent_hash, context, exact=start == context))
        else:
            cache_spans.append(CacheSpan(start, stop, False, tokens, before.digest() if start else b"", start))
        before.update(b"%d,%d:" % (independent, stop - start))
        before.update(tokens.tobytes())
    return tuple(cache_spans)


def composable(request: Request) -> tuple[CacheSpan, ...]:
    """As `isolated`, for models with recurrent layers: a span stores a map of the state, text stores states.

    Spans have a separate parent hash, so that a document that begins a prompt as ordered text is another entry.
    """
    return _cut_prompt(request, b"span", 0)


def as_seen(request: Request) -> tuple[CacheSpan, ...]:
    """Store independent spans as first computed, behind the text of their first prompt (LMCache's chunks).

    They have a separate parent hash, so that no other layout matches them. Text behind such a span depends on a
    donor that no token identifies, and is not stored. It has a separate parent hash too; otherwise it would match a
    document of the same tokens.
    """
    cache_spans: list[CacheSpan] = []
    for start, stop, independent, tokens in token_runs(request):
        parent_hash = b"as seen" if independent else b"behind" if start else b""
        storable = independent or not start
        cache_spans.append(CacheSpan(start, stop, independent, tokens, parent_hash, start, not independent, storable))
    return tuple(cache_spans)


def repeats(cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
    """Map the index of each repeated span to that of the first equal span of the prompt.

    Spans are equal in tokens and parent hash. Only spans whose KV follows from both are included: an `as_seen` span
    has other KV at another position.
    """
    first_index: dict[tuple[bytes, TokenString], int] = {}
    duplicates = {}
    for index, cache_span in enumerate(cache_spans):
        alone = cache_span.exact or cache_span.context < cache_span.start
        if cache_span.independent and cache_span.storable and alone:
            earlier = first_index.setdefault((cache_span.parent_hash, cache_span.tokens), index)
            if earlier != index:
                duplicates[index] = earlier
    return duplicates


def without_tails(layout: Layout) -> Layout:
    """Return the same layout without storing text behind a span, for repairs that no parent hash identifies.

    Such text has attended to rows that another request, with the same parent hash, would have computed elsewhere.
    """

    def cut(request: Request) -> tuple[CacheSpan, ...]:
        cache_spans = layout(request)
        first = next(
            (index for index, cache_span in enumerate(cache_spans) if cache_span.independent), len(cache_spans)
        )
        behind = (
            cache_span if cache_span.independent else cache_span._replace(storable=False)
            for cache_span in cache_spans[first:]
        )
        return (*cache_spans[:first], *behind)

    return cut


LAYOUTS: dict[str, Layout] = {"whole": whole, "isolated": isolated, "conditioned": conditioned, "as_seen": as_seen}
