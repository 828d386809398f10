"""Admission at the second touch: tokens that are requested once are not stored, so that they displace nothing.

The doorkeeper of TinyLFU (arXiv 1512.00727), for prefixes and spans. The record of touched tokens holds no KV, and
is not limited here.
"""

from __future__ import annotations

from spanlab.core.admission.contract import ADMISSIONS, ComputedPrefix
from spanlab.core.ledger import Ledger
from spanlab.core.prefix_index import RootKey
from spanlab.core.token_string import TokenString


@ADMISSIONS.register("second_touch")
class SecondTouch:
    """As much is kept as an earlier request that has ended computed or read."""

    def __init__(self) -> None:
        self._touched = Ledger()  # not the ledger of causes, which a run may omit

    def admit(self, computed: ComputedPrefix) -> int:
        """Admit the beginning that was touched before."""
        return min(computed.stop, self._touched.lookup(computed.key, computed.tokens)[0])

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record the touched tokens."""
        self._touched.computed(key, tokens, len(tokens))
