"""Answers whose tokens are known before they are computed: teacher forcing."""

from __future__ import annotations

from spanlab.core.scheduled import ScheduledStep


def known_steps(step: ScheduledStep) -> int:
    """How many tokens of each sequence of a decoding step one forward may compute: all that are left, if all are known.

    One where a prompt is computed too, or where an answer is not known or would outgrow the memory.
    """
    if step.chunks or any(sequence.request.output is None for sequence in step.decodes):
        return 1
    left = min((sequence.request.output_len - sequence.generated for sequence in step.decodes), default=1)
    return min(left, step.max_repeats)
