"""Classes of breaks: real-looking prompts of each class, and prompts that only look like one."""

import json
import random
from typing import Any

import pytest

from spanlab.workloads.logs.bodies import BodyParser
from spanlab.workloads.logs.break_classes import (
    CLASSES,
    RULES,
    Difference,
    common_length,
    divergence_of,
    rule_of,
    without_thoughts,
)
from spanlab.workloads.logs.observed import Unread
from spanlab.workloads.logs.rendering import BodyOptions, Section, sections_of

RULES_OF_HOUSE = (
    "You are the assistant of a shop for bicycles. Answer in one paragraph, name the part number, and never promise a "
    "date of delivery.\nIf a customer is angry, offer a call. Prices are in euro and include the tax of the country."
)
PASSAGES = [
    "Chain lines: a chain that is too long jumps under load; remove two links and check the tension on the big ring.",
    "Brake pads wear faster in wet weather, and have to be changed once the groove is gone or the lever goes deep.",
    "Tubeless tyres need sealant every four months; more if the bike stands in a warm and dry room in the summer.",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of the shop, by part number",
            "parameters": {"type": "object"},
        },
    }
    for name in ("search_parts", "get_stock", "open_ticket", "cancel_order")
]


def chat(system: str, *turns: str, **more: Any) -> dict[str, Any]:
    """Return a body; the turns are those of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *messages], **more}


def difference_of(first: dict[str, Any], second: dict[str, Any]) -> Difference | None:
    parser = BodyParser(Unread())
    sides = [sections_of(parser.parse(body, is_line=False), BodyOptions()) for body in (first, second)]
    where = divergence_of(sides[0], sides[1])
    if where is None:
        return None
    goes_on = any(section.role == "assistant" for section in sides[1][: where.section])
    return Difference(sides[0][where.section :], sides[1][where.section :], where.character, goes_on)


def class_of(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    difference = difference_of(first, second)
    return None if difference is None else rule_of(difference).kind


STAMPS = [
    ("Current time: 2026-05-04 10:01:07 UTC.", "Current time: 2026-05-04 10:01:12 UTC."),
    ("Today is Monday, May 4, 2026.", "Today is Tuesday, May 5, 2026."),
    ("<env>\nToday's date: 2026-05-04\n</env>", "<env>\nToday's date: 2026-05-05\n</env>"),
    ("now=1777889400", "now=1777889405"),
    ('{"ts": 1777889400123, "shop": "north"}', '{"ts": 1777889405987, "shop": "north"}'),
    ("It is 9:59 AM in Berlin.", "It is 10:00 AM in Berlin."),
    ("2026-05-04T10:01:07.123456+02:00 session start", "2026-05-04T10:03:59.9+02:00 session start"),
    ("04.05.2026, 10:01 Uhr", "05.05.2026, 08:30 Uhr"),
    ("当前日期：2026年5月4日", "当前日期：2026年5月5日"),
]
IDS = [
    ("Request 3f2b9c1e-77aa-4c1d-9b1e-0a1b2c3d4e5f", "Request a11c9c1e-77aa-4c1d-9b1e-0a1b2c3d4e5f"),
    ("trace: 9f86d081884c7d65", "trace: 2c26b46b68ffc68f"),
    ("x-anthropic-billing-header: cch=7a31f0cc9;", "x-anthropic-billing-header: cch=1b02d9ef4;"),
    ("session_id=sess_9KdE72mQp0Zx31", "session_id=sess_1LdE72mQp0Zx99"),
    ("This is call #9 of today.", "This is call #10 of today."),
    ("Conversation 41", "Conversation 42"),
]
HOME = "/".join(("", "home", ""))
NAMES = [
    ("You are talking to Ann Lee.", "You are talking to Bob."),
    ("User: ann.lee@example.org", "User: bob@example.org"),
    (f"Working directory: {HOME}ann/shop", f"Working directory: {HOME}robert/shop"),
    ("Customer name: Ann", "Customer name: Anna Maria"),
]
PARAMETERS = [
    ("Reasoning: high", "Reasoning: low"),
    ("Thinking mode: on", "Thinking mode: off"),
    ("Answer language: German", "Answer language: French"),
]


@pytest.mark.parametrize(
    ("kind", "sides"),
    [(kind, sides) for kind, pairs in
     {"time_stamp": STAMPS, "request_id": IDS, "user_name": NAMES, "changed_parameter": PARAMETERS}.items()
     for sides in pairs],
)  # fmt: skip
@pytest.mark.parametrize("where", ["first", "middle", "last", "tool"])
def test_volatile_word_gives_the_class(kind: str, sides: tuple[str, str], where: str):
    def body(line: str) -> dict[str, Any]:
        lines = {"first": f"{line}\n{RULES_OF_HOUSE}", "last": f"{RULES_OF_HOUSE}\n{line}"}
        middle = RULES_OF_HOUSE.replace("\n", f"\n{line}\n")
        tool = {"type": "function", "function": {"name": "a", "description": f"{line}\n{RULES_OF_HOUSE}"}}
        tools = [tool, *TOOLS] if where == "tool" else TOOLS
        return chat(RULES_OF_HOUSE if where == "tool" else lines.get(where, middle), "My chain jumps.", tools=tools)

    assert class_of(body(sides[0]), body(sides[1])) == kind
    assert class_of(body(sides[1]), body(sides[0])) == kind


def test_first_of_several_volatile_lines_gives_the_class():
    def system(date: str, name: str, town: str) -> str:
        return f"Date: {date}\nUser name: {name}\nTown: {town}\n{RULES_OF_HOUSE}"

    first = chat(system("2026-05-04", "Ann", "Bern"), "Hi")
    assert class_of(first, chat(system("2026-05-05", "Robert", "Jena"), "Hi")) == "time_stamp"
    assert class_of(first, chat(system("2026-05-04", "Robert", "Jena"), "Hi")) == "user_name"


def test_stamp_that_opens_a_turn_of_the_user():
    def body(stamp: str) -> dict[str, Any]:
        turn = f"<context>\nTime: {stamp}\n</context>\n{RULES_OF_HOUSE}\nMy chain jumps."
        return chat("S", turn, "Check the length.", "How?")

    assert class_of(body("2026-05-04 10:01"), body("2026-05-04 10:02")) == "time_stamp"


SHOP = chat(
    RULES_OF_HOUSE, "My chain jumps.", "Check its length.", "It is new.", "Then the cassette is worn.", "Thanks"
)


def turns(*contents: str, system: str = RULES_OF_HOUSE, **more: Any) -> dict[str, Any]:
    return chat(system, *contents, **more)


def thinking(text: str | None) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def reasoned(*thoughts: str | None) -> dict[str, Any]:
    body = turns("My chain jumps.", "Check its length.", "It is new.", "Then the cassette is worn.", "Thanks")
    for message, thought in zip(body["messages"][2::2], thoughts, strict=False):
        message |= thinking(thought)
    return body


def with_documents(*numbers: int) -> dict[str, Any]:
    return turns("My chain jumps.", documents=[{"title": f"p{number}", "text": PASSAGES[number]} for number in numbers])


def in_text(*numbers: int) -> dict[str, Any]:
    passages = "\n\n".join(f"[{rank}] {PASSAGES[number]}" for rank, number in enumerate(numbers, 1))
    return turns(f"{passages}\n\nMy chain jumps.")


def calls(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_stock", "arguments": arguments}}
    body = turns("Is it in stock?", "", "2 left", "Two are left.", "Thanks")
    body["messages"][2] |= {"tool_calls": [call]}
    return body


def with_tools(*numbers: int) -> dict[str, Any]:
    return turns("My chain jumps.", tools=[TOOLS[number] for number in numbers])


def chatml(*parts: str, end: str = "<|im_end|>\n") -> dict[str, Any]:
    return {"prompt": "".join(f"<|im_start|>{part}{end}" for part in parts)}


KEYS = [{"type": "function", "function": dict(reversed(tool["function"].items()))} for tool in TOOLS]  # type: ignore[attr-defined]
LONG = "The stock of all shops, by part number: " + " ".join(f"{random.Random(n).random():.4f}" for n in range(200))
MEETING = "Yes, we meet on 2026-05-04, and I bring the lamp and the pump with me."
BOOKED = "Booked, and see you, with the red bike and the lamp, at the north gate."
PAIRS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "reordered_tools": [(with_tools(0, 1, 2, 3), with_tools(2, 0, 1, 3)), (with_tools(0, 1), with_tools(1, 0))],
    "changed_tools": [(with_tools(0, 1, 2), with_tools(0, 2)), (with_tools(0, 1), with_tools(3, 1))],
    "reordered_keys": [
        (turns("Hi", tools=TOOLS), turns("Hi", tools=KEYS)),
        (calls('{"part": "KM-9", "shop": "north"}'), calls('{"shop": "north", "part": "KM-9"}')),
        (turns(json.dumps({"a": [1, 2], "b": 2})), turns(json.dumps({"b": 2, "a": [1, 2]}))),
    ],
    "shuffled_documents": [(with_documents(0, 1, 2), with_documents(2, 0, 1)), (in_text(0, 1, 2), in_text(1, 2, 0))],
    "changed_documents": [(with_documents(0, 1), with_documents(2, 1))],
    "dropped_reasoning": [
        (reasoned("A chain jumps if it is long.", None), reasoned(None, None)),
        (
            turns("My chain jumps.", "<think>\nToo long?\n</think>\n\nCheck its length.", "It is new."),
            turns("My chain jumps.", "Check its length.", "It is new."),
        ),
    ],
    "compaction": [
        (SHOP, turns("This session is continued from a previous conversation. Summary: chain jumps", "Ok", "Go on")),
    ],
    "truncation": [
        (SHOP, {"messages": [SHOP["messages"][0], *SHOP["messages"][3:], {"role": "user", "content": "Bye"}]}),
        (
            turns("How many?", "I look.", f"{LONG}", "Many.", "Thanks"),
            turns("How many?", "I look.", f"{LONG[:90]} [truncated]", "Many.", "Thanks"),
        ),
    ],
    "edited_history": [
        (SHOP, turns("My chain jumps.", "Check its length.", "It is old.", "Then the cassette is worn.", "Thanks")),
        (SHOP, turns("My chain jumps.", "Check its length.", "It squeaks.", "Oil it.")),
        # a date in a history that was changed is no stamp
        (
            turns("Meet on 2026-05-04 at the shop?", MEETING, "Fine."),
            turns("Meet on 2026-06-11 at the station?", MEETING, "Fine."),
        ),
        (
            turns("Book me for 2026-05-04 please, with the red bike and a lamp.", BOOKED, "Fine."),
            turns("Book me for 2026-05-05 please, with the red bike and a lamp.", BOOKED, "Fine."),
        ),
    ],
    "changed_system_prompt": [
        (turns("My chain jumps."), turns("My chain jumps.", system="You are a poet. Write of rivers.")),
        # two dates, and another text behind them
        (
            turns("Hi", system="On 2026-05-04 we close at five, and the phone is off until Monday evening."),
            turns("Hi", system="On 2026-06-11 there is a race in the town, so that all roads are closed for cars."),
        ),
        # a number that is a part of another sentence
        (turns("Hi", system="You have 3 shops in the town, each"), turns("Hi", system="You have 9 lives.")),
    ],
    "white_space": [
        (turns("Hi", system="You are a shop. \n\nBe kind."), turns("Hi", system="You are a shop.\n\nBe kind.")),
        (turns("Hi", system=RULES_OF_HOUSE.replace("\n", "\r\n")), turns("Hi", system=RULES_OF_HOUSE)),
    ],
    "template": [
        (
            chatml(f"system\n{RULES_OF_HOUSE}", "user\nMy chain jumps and the bike is new, what can I do?"),
            chatml(f"user\n{RULES_OF_HOUSE}", "user\nMy chain jumps and the bike is new, what can I do?"),
        ),
    ],
    "new_text": [
        (turns("My chain jumps."), turns("Do you sell helmets?")),
        (turns("What is 2 + 2?"), turns("What is 2 + 3?")),
        (turns("Is 2026-05-04 a holiday?"), turns("Is 2026-06-11 a holiday?")),
        (turns("[2026-05-04 10:01] My chain jumps."), turns("[2026-05-04 10:02] Do you sell helmets?")),
        (turns("user asks about Ann"), turns("user asks about Bob")),
        (turns("Order 41?"), turns("Order 42?")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "pair"), [(kind, pair) for kind, pairs in PAIRS.items() for pair in pairs])
def test_prompts_have_the_class(kind: str, pair: tuple[dict[str, Any], dict[str, Any]]):
    assert class_of(*pair) == kind


def test_conversation_that_goes_on_has_no_class():
    shorter = {"messages": SHOP["messages"][:4]}
    assert class_of(shorter, SHOP) is None
    assert class_of(SHOP, shorter) is None


def test_parameter_and_template_are_given():
    difference = difference_of(*PAIRS["new_text"][0])
    assert difference is not None
    given = Difference(difference.earlier, difference.later, difference.character, parameter="model")
    assert rule_of(given).kind == "changed_parameter"
    assert rule_of(Difference(difference.earlier, difference.later, 0, by_template=True)).kind == "template"


HEAD = "<|im_start|>user\nMy chain jumps and the bike is new.<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Shift to the smallest ring and look at the third link of the chain, it may be bent or dry.<|im_end|>\n"
#: What a template renders of messages that go on, by the class of the difference.
RENDERED = {
    "template_reasoning": (
        f"{HEAD}<think>\nA link is stiff.\n</think>\n\n{ANSWER}",
        f"{HEAD}{ANSWER}<|im_start|>user\nOk",
    ),
    "template_date": (f"Today Date: 26 Jul 2026\n\n{HEAD}{ANSWER}", f"Today Date: 27 Jul 2026\n\n{HEAD}{ANSWER}"),
    "template_marks": (f"<|begin_of_text|>{HEAD}{ANSWER}", f"{HEAD}{ANSWER}"),
    "template": (
        f"{HEAD}{ANSWER}",
        f"{HEAD}No. Ask a shop that has a lift, for the chain may be too long.<|im_end|>\n",
    ),
}


@pytest.mark.parametrize(("kind", "texts"), RENDERED.items())
def test_what_a_template_changes_is_a_class_of_its_own(kind: str, texts: tuple[str, str]):
    place = next(index for index, (first, second) in enumerate(zip(*texts, strict=False)) if first != second)
    sides = [[Section("rendered prompt", text, "rendered")] for text in texts]
    assert rule_of(Difference(*sides, place, by_template=True)).kind == kind
    assert rule_of(Difference(*sides[::-1], place, by_template=True)).kind == kind


def test_every_class_has_rule_and_words():
    assert {rule.kind for rule in RULES} | {"other"} == set(CLASSES)
    of_words = {"other", "time_stamp", "request_id", "user_name", "changed_parameter"}
    assert set(CLASSES) - of_words - set(RENDERED) == set(PAIRS) - set(RENDERED)


def test_thoughts_without_an_end_stay():
    assert without_thoughts("a<think>b</think> c<think>d") == "ac<think>d"
    assert without_thoughts("<think>" * 100_000) == "<think>" * 100_000
    assert without_thoughts("</think>a<thinking>b</thinking>\n\nc") == "</think>ac"


@pytest.mark.parametrize("seed", range(20))
def test_common_beginning_is_the_longest(seed: int):
    rng = random.Random(seed)
    first, second = ("".join(rng.choices("ab", [20, 1], k=rng.randrange(60))) for _ in range(2))
    expected = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert common_length(first, second) == (min(len(first), len(second)) if expected is None else expected)
