"""Bypass: a prefix that displaces too much, or is unlikely to be requested again, is not stored.

Caches of objects of many sizes do so, as AdaptSize (Berger et al., NSDI 2017), whose admission probability falls
with the size. Here both limits are fixed.
"""

from __future__ import annotations

from spanlab.checks import share as check_share
from spanlab.core.admission.contract import ADMISSIONS, AdmissionFacts, ComputedPrefix
from spanlab.core.ledger import Ledger
from spanlab.core.prefix_index import RootKey
from spanlab.core.token_string import TokenString


@ADMISSIONS.register("bypass")
class Bypass:
    """Nothing is kept that would take more than a share of the store, or of which too little is known.

    `share`  of the store's bytes that one prefix or span may take
    `known`  share of its tokens that an earlier request must have had; 0 asks for nothing
    """

    def __init__(self, facts: AdmissionFacts, share: float = 0.1, known: float = 0.0) -> None:
        check_share("admission_options.share", share)
        check_share("admission_options.known", known)
        budget = facts.budget
        self._most = share * min(budget.kv_bytes, budget.total_bytes)
        self._token_bytes, self._known, self._touched = facts.token_bytes, known, Ledger()

    def admit(self, computed: ComputedPrefix) -> int:
        """Admit all computed tokens or none."""
        length = len(computed.tokens)
        if length * self._token_bytes > self._most:
            return 0
        touched = self._touched.lookup(computed.key, computed.tokens)[0] if self._known else 0
        return computed.stop if touched >= self._known * length else 0

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record the tokens, where the rule reads them."""
        if self._known:
            self._touched.computed(key, tokens, len(tokens))
