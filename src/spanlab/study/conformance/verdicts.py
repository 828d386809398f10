"""Measurements of properties and the verdicts on them."""

from __future__ import annotations

from dataclasses import dataclass

PASSED, FAILED, REFUSED, ABSENT = "passed", "failed", "refused", "not applicable"
SUPPORTED = "supported_layers"


@dataclass(frozen=True)
class Measurement:
    """Result of a property function.

    `value`  measured value; None where the precondition, such as reuse, did not occur
    `limit`  largest value that passes; None where the property does not apply to the model
    `what`   description of the value, or the reason why there is none
    """

    value: float | None
    limit: float | None
    what: str

    @property
    def verdict(self) -> str:
        """Passed, failed, or not applicable; NaN and None fail."""
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
    def of(name: str, measured: Measurement) -> Verdict:
        """Convert the measurement of a property to its verdict."""
        return Verdict(name, measured.verdict, measured.value, measured.limit, measured.what)


def not_applicable(reason: str) -> Measurement:
    """Measurement of a property that does not apply to the model."""
    return Measurement(None, None, reason)


def refused(reason: str) -> Verdict:
    """Verdict on a model that fails the support check."""
    return Verdict(SUPPORTED, REFUSED, None, None, reason)


def supported(layers: int) -> Verdict:
    """Verdict on a model that passes the support check."""
    return Verdict(SUPPORTED, PASSED, 0.0, 0.0, f"layers that spans cannot be reused in, of {layers}")
