"""Character ranges of messages and spans in the rendered text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from spanlab.queries.query import Message
from spanlab.queries.template import ChatTemplate
from spanlab.queries.units import Chat, Unit
from spanlab.queries.wrapping import Wrapping, closings, unit_wrapping


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters `[start, stop)` of the prompt, and the messages `[first, last)` whose contents they contain."""

    start: int
    stop: int
    messages: tuple[int, int]
    independent: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Text of the prompt, half-open range of each message's content, and spans that cover the text without gaps."""

    text: str
    contents: tuple[tuple[int, int], ...]
    spans: tuple[TextSpan, ...]


def compute_layout(chat: Chat, template: ChatTemplate) -> Layout:
    """Apply the template once to all messages, with an open assistant's turn, and locate every range in the text.

    The span of an independent unit includes its wrapping, which is the same at every position. The span of an ordered
    message includes the other text around it. Text that belongs to neither (a BOS, a default system prompt, the open
    turn) is a separate ordered span. Raises ValueError if the template changes a content or wraps an independent unit
    differently by position.
    """
    roles = [message.role for message in chat.messages]
    gaps = template.gaps(roles, open_turn=True)
    text = template.apply(((message.role, message.text) for message in chat.messages), open_turn=True)
    if text != _fill_gaps(gaps, [message.text for message in chat.messages]):
        raise ValueError(_change_error(chat.messages, template))
    check_open_turn(template, roles, gaps)
    lengths = [len(message.text) for message in chat.messages]
    starts = [sum(pair) for pair in zip(accumulate(map(len, gaps[:-1])), accumulate(lengths, initial=0), strict=False)]
    contents = tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
    fixed = _independent_spans(chat, template, gaps, contents)
    return Layout(text, contents, tuple(_spans(chat, text, contents, fixed, closings(template, roles))))


def _fill_gaps(gaps: Sequence[str], contents: Sequence[str]) -> str:
    return gaps[0] + "".join(chain.from_iterable(zip(contents, gaps[1:], strict=True)))


def _change_error(messages: Sequence[Message], template: ChatTemplate) -> str:
    """The error message for the first message whose text the template changes."""
    roles = [message.role for message in messages]
    gaps = template.gaps(roles, open_turn=True)
    for number, message in enumerate(messages):
        placeholders = ["x"] * len(messages)
        placeholders[number] = message.text
        if template.apply(zip(roles, placeholders, strict=True), open_turn=True) != _fill_gaps(gaps, placeholders):
            shown = message.text if len(message.text) <= 40 else f"{message.text[:18]}…{message.text[-18:]}"
            description = f"message {number + 1}, {message.role} {shown!r}"
            break
    else:
        description = "some of these messages"
    return (
        f"the chat template of {template.name} changes {description}, so its place in the prompt cannot be found;"
        " expected a text that the template leaves as it is, often one without spaces at its ends"
    )


def check_open_turn(template: ChatTemplate, roles: Sequence[str], gaps: Sequence[str]) -> None:
    """Raise ValueError unless the template opens an assistant's turn, or ends a user's turn where an answer begins."""
    if len(gaps[-1]) > len(template.gaps(roles, open_turn=False)[-1]):
        return
    open_gap = template.gaps(["user"], open_turn=True)[-1]
    answer_gap = template.gaps(["user", "assistant"], open_turn=False)[1]
    # Spaces before an answer belong to the answer, since its first token contains them.
    if roles[-1] != "user" or gaps[-1] != open_gap or answer_gap.rstrip() != open_gap.rstrip():
        raise ValueError(
            f"the chat template of {template.name} leaves no assistant turn open behind these messages;"
            " expected a template with add_generation_prompt"
        )


def _independent_spans(
    chat: Chat, template: ChatTemplate, gaps: Sequence[str], contents: Sequence[tuple[int, int]]
) -> dict[Unit, TextSpan]:
    units = [unit for unit in chat.units if unit.independent]
    roles = {unit: tuple(message.role for message in chat.messages[unit.start : unit.stop]) for unit in units}
    wrappings = {kind: unit_wrapping(template, kind) for kind in dict.fromkeys(roles.values())}
    spans: dict[Unit, TextSpan] = {}
    previous_stop = 0
    for unit in units:
        wrapping = wrappings[roles[unit]]
        start = contents[unit.start][0] - len(wrapping.opening)
        if start < previous_stop or not _matches_gaps(wrapping, gaps[unit.start : unit.stop + 1]):
            raise ValueError(
                f"the chat template of {template.name} wraps message {unit.start + 1} by its place in this chat, so it"
                " cannot be an independent span; expected a template that wraps a message in the same way everywhere"
            )
        previous_stop = contents[unit.stop - 1][1] + len(wrapping.closing)
        spans[unit] = TextSpan(start, previous_stop, (unit.start, unit.stop), True)
    return spans


def _matches_gaps(wrapping: Wrapping, gaps: Sequence[str]) -> bool:
    return (
        gaps[0].endswith(wrapping.opening)
        and tuple(gaps[1:-1]) == wrapping.between
        and gaps[-1].startswith(wrapping.closing)
    )


def _spans(
    chat: Chat,
    text: str,
    contents: Sequence[tuple[int, int]],
    fixed: dict[Unit, TextSpan],
    closing: dict[str, str],
) -> list[TextSpan]:
    """All spans in order: the fixed ones, and ordered text split after the known closing of each message."""
    spans: list[TextSpan] = []
    position = 0
    next_start = {unit.start: span.start for unit, span in fixed.items()}
    for unit in chat.units:
        if unit in fixed:
            _append_text(spans, position, fixed[unit].start, unit.start)
            spans.append(fixed[unit])
        else:
            end = contents[unit.start][1]
            closed = closing.get(chat.messages[unit.start].role, "")
            closed_at = end + len(closed) if text.startswith(closed, end) else end
            stop = min(closed_at, next_start.get(unit.stop, closed_at))
            spans.append(TextSpan(position, stop, (unit.start, unit.stop), False))
        position = spans[-1].stop
    _append_text(spans, position, len(text), len(chat.messages))
    return spans


def _append_text(spans: list[TextSpan], start: int, stop: int, message: int) -> None:
    """Append an ordered span for text between messages, unless the text is empty."""
    if start < stop:
        spans.append(TextSpan(start, stop, (message, message), False))
