"""Admission at the second touch: what is asked for once is not kept, so that it displaces nothing.

The doorkeeper of TinyLFU (arXiv 1512.00727), for prefixes and spans. The memory of what was touched holds no KV, and is
not limited here.
"""

from __future__ import annotations

from spanlab.core.admission.contract import ADMISSIONS, Computed
from spanlab.core.ledger import Ledger
from spanlab.core.prefix_index import RootKey
from spanlab.core.token_string import TokenString


@ADMISSIONS.register("second_touch")
class SecondTouch:
    """As much is kept as an earlier request that has ended computed or read."""

    def __init__(self) -> None:
        self._touched = Ledger()  # not that of causes, which may be left out

    def admit(self, computed: Computed) -> int:
        """The beginning that was touched before."""
        return min(computed.stop, self._touched.known(computed.key, computed.tokens)[0])

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Remember what was touched."""
        self._touched.computed(key, tokens, len(tokens))
