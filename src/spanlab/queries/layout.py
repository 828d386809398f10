"""Where messages and spans stand in the rendered text, in characters."""

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
    """Characters `[start, stop)` of the prompt and the messages `[first, last)` whose contents lie in them."""

    start: int
    stop: int
    messages: tuple[int, int]
    independent: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The prompt's text, the half-open range of each message's content, and spans that cover the text without gaps."""

    text: str
    contents: tuple[tuple[int, int], ...]
    spans: tuple[TextSpan, ...]


def lay_out(chat: Chat, template: ChatTemplate) -> Layout:
    """Apply the template once to all messages, an assistant's turn standing open, and find every range in the text.

    An independent unit gets the wrapping that it has everywhere; an ordered message gets what else stands around it;
    text that belongs to neither (a BOS, a default system prompt, the open turn) is an ordered span of its own. Raises
    ValueError if the template changes a content or wraps an independent unit by its place.
    """
    roles = [message.role for message in chat.messages]
    gaps = template.gaps(roles, open_turn=True)
    text = template.apply(((message.role, message.text) for message in chat.messages), open_turn=True)
    if text != _filled(gaps, [message.text for message in chat.messages]):
        raise ValueError(_changed(chat.messages, template))
    check_open_turn(template, roles, gaps)
    lengths = [len(message.text) for message in chat.messages]
    starts = [sum(pair) for pair in zip(accumulate(map(len, gaps[:-1])), accumulate(lengths, initial=0), strict=False)]
    contents = tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
    fixed = _independent_spans(chat, template, gaps, contents)
    return Layout(text, contents, tuple(_spans(chat, text, contents, fixed, closings(template, roles))))


def _filled(gaps: Sequence[str], contents: Sequence[str]) -> str:
    return gaps[0] + "".join(chain.from_iterable(zip(contents, gaps[1:], strict=True)))


def _changed(messages: Sequence[Message], template: ChatTemplate) -> str:
    """The sentence about the first message whose text does not come out of the template as it went in."""
    roles = [message.role for message in messages]
    gaps = template.gaps(roles, open_turn=True)
    for number, message in enumerate(messages):
        stand_ins = ["x"] * len(messages)
        stand_ins[number] = message.text
        if template.apply(zip(roles, stand_ins, strict=True), open_turn=True) != _filled(gaps, stand_ins):
            shown = message.text if len(message.text) <= 40 else f"{message.text[:18]}…{message.text[-18:]}"
            what = f"message {number + 1}, {message.role} {shown!r}"
            break
    else:
        what = "some of these messages"
    return (
        f"the chat template of {template.name} changes {what}, so its place in the prompt cannot be found;"
        " expected a text that the template leaves as it is, often one without spaces at its ends"
    )


def check_open_turn(template: ChatTemplate, roles: Sequence[str], gaps: Sequence[str]) -> None:
    """Either the template writes an opening of the assistant's turn, or a user's turn ends where an answer begins."""
    if len(gaps[-1]) > len(template.gaps(roles, open_turn=False)[-1]):
        return
    asked = template.gaps(["user"], open_turn=True)[-1]
    answered = template.gaps(["user", "assistant"], open_turn=False)[1]
    # Spaces before an answer are the answer's own, as its first token carries them.
    if roles[-1] != "user" or gaps[-1] != asked or answered.rstrip() != asked.rstrip():
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
    free = 0
    for unit in units:
        wrapping = wrappings[roles[unit]]
        start = contents[unit.start][0] - len(wrapping.opening)
        if start < free or not _fits(wrapping, gaps[unit.start : unit.stop + 1]):
            raise ValueError(
                f"the chat template of {template.name} wraps message {unit.start + 1} by its place in this chat, so it"
                " cannot be an independent span; expected a template that wraps a message in the same way everywhere"
            )
        free = contents[unit.stop - 1][1] + len(wrapping.closing)
        spans[unit] = TextSpan(start, free, (unit.start, unit.stop), True)
    return spans


def _fits(wrapping: Wrapping, gaps: Sequence[str]) -> bool:
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
    """All spans in order: the fixed ones, and ordered text cut behind each message, as far as its closing is known."""
    spans: list[TextSpan] = []
    position = 0
    next_start = {unit.start: span.start for unit, span in fixed.items()}
    for unit in chat.units:
        if unit in fixed:
            _fill(spans, position, fixed[unit].start, unit.start)
            spans.append(fixed[unit])
        else:
            end = contents[unit.start][1]
            closed = closing.get(chat.messages[unit.start].role, "")
            closed_at = end + len(closed) if text.startswith(closed, end) else end
            stop = min(closed_at, next_start.get(unit.stop, closed_at))
            spans.append(TextSpan(position, stop, (unit.start, unit.stop), False))
        position = spans[-1].stop
    _fill(spans, position, len(text), len(chat.messages))
    return spans


def _fill(spans: list[TextSpan], start: int, stop: int, message: int) -> None:
    """Text between messages becomes an ordered span, unless there is none."""
    if start < stop:
        spans.append(TextSpan(start, stop, (message, message), False))
