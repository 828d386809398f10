"""Verdicts on properties of reuse, and on the difference of two greedy answers to the same
prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from spanlab.report.table import MISSING, Cell, Column, Table, significant

# ------------------------------------------------------------------------------
# Measurements of properties and the verdicts on them.
# ------------------------------------------------------------------------------

PASSED = "passed"
FAILED = "failed"
REFUSED = "refused"
ABSENT = "not applicable"
UNTESTED = "not tested"


@dataclass(frozen=True)
class Measurement:
    """Result of a property function.

    `value`    measured value; None where the precondition, such as reuse, did not occur
    `limit`    largest value that passes; None where nothing was measured
    `what`     description of the value, or the reason why there is none
    `without`  the verdict where there is no limit
    `example`  the smallest prompt that fails, as in `summary.json`
    """

    value: float | None
    limit: float | None
    what: str
    without: str = ABSENT
    example: dict[str, object] | None = None

    @property
    def verdict(self) -> str:
        """Passed or failed, or the verdict without a limit; NaN and None fail."""
        if self.limit is None:
            return self.without
        return PASSED if self.value is not None and self.value <= self.limit else FAILED


Measurements = dict[str, Measurement]


def not_applicable(reason: str) -> Measurement:
    """Measurement of a property that does not apply to the model."""
    return Measurement(None, None, reason)


_COLUMNS = (
    Column("property", "property", left=True),
    Column("verdict", "verdict", left=True),
    *(Column("measured", "measured"), Column("limit", "limit")),
    Column("what", "what", keep=1, left=True),
)


def verdict_table(subject: str, measured: Measurements) -> Table:
    """One row per property; `subject` is the name of the model or the address of the server."""
    rows = [
        (Cell(name, name), Cell(measurement.verdict, measurement.verdict),
         _number(measurement.value), _number(measurement.limit), Cell(measurement.what, measurement.what))
        for name, measurement in measured.items()
    ]  # fmt: skip
    return Table("properties", f"Conformance of {subject}", _COLUMNS, tuple(rows))


def _number(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, significant(value))


def verdict_rows(measured: Measurements) -> dict[str, dict[str, object]]:
    """The properties as in `summary.json`."""
    return {
        name: {
            "verdict": measurement.verdict,
            "measured": measurement.value,
            "limit": measurement.limit,
            "what": measurement.what,
        }
        | ({} if measurement.example is None else {"example": measurement.example})
        for name, measurement in measured.items()
    }


# ------------------------------------------------------------------------------
# Difference of two greedy answers to one prompt: their log-probabilities as long as the tokens
# before are equal, and the gap at the first other token.
# ------------------------------------------------------------------------------


_EQUAL = 1e-5  # gap of two log-probabilities of equal logits, in float32
_UNEVEN = 0.05  # of a step
_FEW_GAPS = 16


@dataclass(frozen=True)
class Choice:
    """A generated token with the log-probabilities of the likeliest tokens, its own among them."""

    token: str
    logprobs: dict[str, float]

    @property
    def least(self) -> float:
        """Smallest reported log-probability of the other tokens: no token that is not reported has
        a larger one."""
        return min(
            (value for token, value in self.logprobs.items() if token != self.token),
            default=self.logprobs[self.token],
        )

    def at_most(self, token: str) -> float:
        """Log-probability of a token; the largest possible one where it is not reported."""
        return self.logprobs.get(token, self.least)


@dataclass(frozen=True)
class Difference:
    """Difference of an answer to its reference.

    `value`     largest difference of log-probabilities in equal contexts
    `position`  position of that difference
    `fork`      position of the first other token; None where all tokens are equal
    `tokens`    tokens of answer and reference there; empty: the answer ended
    `gaps`      log-probability of each of these tokens above that of the other, in its own answer
    """

    value: float = 0.0
    position: int = 0
    fork: int | None = None
    tokens: tuple[str, str] = ("", "")
    gaps: tuple[float, float] = field(default=(0.0, 0.0))


def difference(answer: Sequence[Choice], reference: Sequence[Choice]) -> Difference:
    """Compare two answers up to their first other token, whose half gap is a difference too.

    Two log-probabilities that are each off by d can swap tokens with a gap of 2 d.
    """
    worst, position = 0.0, 0
    for index, (ours, theirs) in enumerate(zip(answer, reference, strict=False)):
        value = _distance(ours, theirs)
        forks = ours.token != theirs.token
        gaps = _gap(ours, theirs.token), _gap(theirs, ours.token)
        if forks:
            value = max(value, *(gap / 2 for gap in gaps))
        if value > worst:
            worst, position = value, index
        if forks:
            return Difference(worst, position, index, (ours.token, theirs.token), gaps)
    if len(answer) == len(reference):
        return Difference(worst, position)
    # one answer ends first: its end is a token that no answer reports
    end = min(len(answer), len(reference))
    is_ours = len(answer) > end
    choice = (answer if is_ours else reference)[end]
    gap = choice.logprobs[choice.token] - choice.least
    tokens = (choice.token, "") if is_ours else ("", choice.token)
    gaps = (gap, 0.0) if is_ours else (0.0, gap)
    worst, position = max((worst, position), (gap / 2, end))
    return Difference(worst, position, end, tokens, gaps)


def logit_step(answers: Iterable[Sequence[Choice]]) -> float:
    """Step of the logits in narrow formats, as bfloat16: all gaps of log-probabilities are
    multiples; 0: no step."""
    gaps: list[float] = []
    for choices in answers:
        for choice in choices:
            values = sorted(choice.logprobs.values())
            gaps += [gap for low, high in pairwise(values) if (gap := high - low) > _EQUAL]
    step = min(gaps, default=0.0)
    if len(gaps) < _FEW_GAPS or any(abs(gap / step - round(gap / step)) > _UNEVEN for gap in gaps):
        return 0.0
    return step


def _distance(ours: Choice, theirs: Choice) -> float:
    """Largest difference of log-probabilities; for a token that one answer does not report, the
    least possible."""
    differences = [
        abs(value - theirs.logprobs[token])
        for token, value in ours.logprobs.items()
        if token in theirs.logprobs
    ]
    differences += [
        value - theirs.least
        for token, value in ours.logprobs.items()
        if token not in theirs.logprobs
    ]
    differences += [
        value - ours.least for token, value in theirs.logprobs.items() if token not in ours.logprobs
    ]
    return max(0.0, *differences)


def _gap(choice: Choice, other: str) -> float:
    return choice.logprobs[choice.token] - choice.at_most(other)
