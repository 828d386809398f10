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
    `refused`  the model fails the support check
    """

    value: float | None
    limit: float | None
    what: str
    refused: bool = False

    @property
    def verdict(self) -> str:
        """Passed, failed, refused or not applicable; NaN and None fail."""
        if self.limit is None:
            return REFUSED if self.refused else ABSENT
        return PASSED if self.value is not None and self.value <= self.limit else FAILED


def not_applicable(reason: str) -> Measurement:
    """Measurement of a property that does not apply to the model."""
    return Measurement(None, None, reason)
