"""What a property comes to: a number and its limit, and the verdict that follows."""

from __future__ import annotations

from dataclasses import dataclass

PASSED, FAILED, REFUSED, ABSENT = "passed", "failed", "refused", "not applicable"
SUPPORTED = "supported_layers"


@dataclass(frozen=True)
class Measured:
    """What a property function returns.

    `value`  what was measured; None where what was to be shown, such as reuse, did not happen
    `limit`  the largest value that passes; None where the model can have nothing of the kind
    `what`   what the value is, in words; the reason where there is none
    """

    value: float | None
    limit: float | None
    what: str

    @property
    def verdict(self) -> str:
        """Passed, failed, or not applicable; a value that is no number has failed."""
        if self.limit is None:
            return ABSENT
        return PASSED if self.value is not None and self.value <= self.limit else FAILED


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    name: str
    verdict: str
    measured: float | None
    limit: float | None
    what: str

    @staticmethod
    def of(name: str, measured: Measured) -> Verdict:
        """The verdict on a property."""
        return Verdict(name, measured.verdict, measured.value, measured.limit, measured.what)


def absent(reason: str) -> Measured:
    """A property that the model cannot have."""
    return Measured(None, None, reason)


def refused(reason: str) -> Verdict:
    """The support check does not let the model through."""
    return Verdict(SUPPORTED, REFUSED, None, None, reason)


def supported(layers: int) -> Verdict:
    """It does."""
    return Verdict(SUPPORTED, PASSED, 0.0, 0.0, f"layers that spans cannot be reused in, of {layers}")
