"""Teacher forcing: answers with known tokens."""

from __future__ import annotations

from spanlab.core.scheduled import ScheduledStep


def known_steps(step: ScheduledStep) -> int:
    """Number of tokens per sequence that one forward may compute: all remaining ones if all answers are known.

    The number is limited by memory (`max_repeats`), and is 1 for a step with a prompt chunk or an unknown answer.
    """
    if step.chunks or any(sequence.request.output is None for sequence in step.decodes):
        return 1
    remaining = min((sequence.request.output_len - sequence.generated for sequence in step.decodes), default=1)
    return min(remaining, step.max_repeats)
