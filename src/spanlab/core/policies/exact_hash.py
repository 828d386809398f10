"""A cache of whole prompts by the hash of all their tokens: only an exact repetition is a match."""

from __future__ import annotations

from hashlib import blake2b

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import RootKey, SharedIndex
from spanlab.core.request import Request
from spanlab.core.reuse import TreeAllocation


class ExactHashPolicy(TreePolicy):
    """Stores prompts without output, because no later prompt equals a prompt with its output."""

    def _store_output(self, allocation: TreeAllocation, generated: int) -> None:
        """Do nothing: output tokens are not stored."""


class WholePromptIndex(SharedIndex):
    """One root per salt and whole prompt, so that prompts with a common prefix share nothing."""

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        return request.cache_salt, 0, blake2b(cache_span.tokens.tobytes(), digest_size=16).digest()
