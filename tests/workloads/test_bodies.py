"""Bodies of requests: parts that become tokens, their order, and parts that are counted as left out."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.offline.replay import build_paths
from spanlab.queries.render import load_tokenizer
from spanlab.workloads.logs.bodies import BodyParser
from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.observed import Unread
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.logs.rendering import BodyOptions, sections_of

from ..support.files import write_lines
from ..support.tokenizers import save_word_tokenizer

_WORDS = "amber basin cobalt dune estuary fjord glacier harbour inlet jetty kelp lagoon meadow nectar orchard"
WORDS = _WORDS.split()
TOOL = {"type": "function", "function": {"name": "look_up", "description": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "dune"}'}}
#: A template as Qwen3 has it: the system prompt, then the tools, then the turns with calls and results.
QWEN_LIKE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{{ '\n\n' }}{%- endif %}{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- endif %}{%- for message in messages %}{%- if not (loop.first and message.role == 'system' and tools) %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{{ message.content or '' }}{%- for call in message.tool_calls or [] %}"
    "{{ '<call>' }}{{ call.function.arguments | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- if enable_thinking is false %}"
    "{{ '<think></think>' }}{%- endif %}{%- endif %}"
)


def text(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def tokens(content: str) -> int:
    return -(-len(content.encode()) // 4)


def reused_tokens(log: Log) -> int:
    return int(build_paths(log.pieces, log.lengths, log.starts).seen_tokens.sum())


def read(folder: Path, *bodies: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "log.jsonl", *bodies), LogSettings(**settings))


def shuffled_tools(number: int) -> list[dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": f"t{k}", "description": text(60, k)}} for k in range(30)]
    return random.Random(number).sample(tools, len(tools))


def test_tools_stand_where_they_are_rendered(tmp_path: Path):
    system = text(800)
    bodies = [
        {
            "tools": shuffled_tools(n),
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": "?"}],
        }
        for n in range(20)
    ]
    first = read(tmp_path, *bodies)
    behind = read(tmp_path, *bodies, tools="after_system")
    lengths = tokens(json.dumps(bodies[0]["tools"])), tokens(f"system\n{system}"), tokens("user\n?")
    assert set(first.prompt_tokens) == set(behind.prompt_tokens) == {sum(lengths)}
    assert reused_tokens(first) < 0.1 * first.prompt_tokens.sum()
    assert reused_tokens(behind) - reused_tokens(first) == 19 * lengths[1]
    assert any("workload.log.tools=after_system" in note for note in first.notes)


@pytest.mark.parametrize("as_blocks", [False, True])
def test_top_level_system_prompt_comes_first(tmp_path: Path, as_blocks: bool):
    def body(number: int) -> dict[str, Any]:
        system = f"request {number:08}\n{text(1500)}"
        blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        return {
            "max_tokens": 9,
            "system": blocks if as_blocks else system,
            "messages": [{"role": "user", "content": "hi"}],
        }

    log = read(tmp_path, *(body(number) for number in range(10)))
    assert log.prompt_tokens[0] == tokens(f"request {0:08}\n{text(1500)}") + tokens("user\nhi")
    assert reused_tokens(log) == 0
    assert (log.unread.share, log.unread.left) == (0, {})


def test_responses_share_their_instructions(tmp_path: Path):
    bodies = [
        {"model": "m", "instructions": text(800), "input": [{"role": "user", "content": f"{n} {text(30, n)}"}]}
        for n in range(1, 21)
    ]
    log = read(tmp_path, *bodies)
    assert reused_tokens(log) == 19 * tokens(text(800))
    asked = read(tmp_path, {"model": "m", "input": "hello there"})
    assert asked.prompt_tokens.tolist() == [tokens("user\nhello there")]


def prompt_of(body: dict[str, Any], **options: Any) -> list[tuple[str, Any]]:

    prompt = BodyParser(Unread()).parse(body, is_line=False)
    return [
        (section.path, getattr(section.content, "kind", section.content))
        for section in sections_of(prompt, BodyOptions(**options))
    ]


def test_every_part_of_anthropic_messages_is_rendered():
    body = {
        "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        "tools": [{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "look"}, {"type": "image", "source": {"data": "iVBO"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x" * 99},
                    {"type": "redacted_thinking", "data": "zzz"},
                    {"type": "tool_use", "id": "1", "name": "t", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "found"}]},
                    {"type": "document", "source": {"type": "text", "data": "paper"}, "title": "T"},
                ],
            },
        ],
    }
    assert prompt_of(body) == [
        ("tools", '[{"name": "t", "input_schema": {}}]'),
        ("system", "A"),
        ("system", "B"),
        ("messages[0]", "user\nlook"),
        ("messages[0]", "image"),
        ("messages[1]", "assistant\n"),
        ("messages[1]", "encrypted reasoning"),
        (
            "messages[1]",
            '{"reasoning_content":"hm","tool_calls":[{"id":"1","type":"function",'
            '"function":{"name":"t","arguments":{"a":1}}}]}',
        ),
        ("messages[2]", 'tool\nfound{"tool_call_id":"1"}'),
        ("messages[2]", "user\nT"),
        ("messages[2]", "paper"),
    ]


def test_every_item_of_responses_is_rendered():
    body = {
        "model": "m",
        "previous_response_id": "resp_1",
        "instructions": "I",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAA"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "open"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "item_reference", "id": "msg_1"},
            {
                "role": "user",
                "content": [{"type": "input_file", "file_id": "f1"}, {"type": "input_image", "image_url": "u"}],
            },
        ],
    }
    call = '{"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}'
    assert prompt_of(body) == [
        ("previous_response_id", "previous_response_id"),
        ("instructions", "I"),
        ("input[0]", "user\nq"),
        ("input[1]", "assistant\n"),
        ("input[1]", "encrypted reasoning"),
        ("input[2]", 'assistant\n{"reasoning_content":"open"}'),
        ("input[3]", f"assistant\n{call}"),
        ("input[4]", 'tool\nr{"tool_call_id":"c"}'),
        ("input[5]", "assistant\n"),
        ("input[5]", "item_reference"),
        ("input[6]", "user\n"),
        ("input[6]", "file"),
        ("input[6]", "image"),
    ]


def test_functions_documents_and_names_are_rendered():
    body = {
        "functions": [{"name": "f"}],
        "documents": [{"title": "T", "text": "D"}, "plain"],
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None},
            {"role": "user", "name": "ann", "content": "q"},
        ],
    }
    assert [path for path, _ in prompt_of(body)] == [
        *("tools", "messages[0]", "documents", "documents", "messages[1]", "messages[2]")
    ]
    sections = [content for _, content in prompt_of(body, tools="after_system")]
    assert sections[:4] == ["system\nS", '[{"name": "f"}]', '{"title": "T", "text": "D"}', "plain"]
    assert sections[5] == 'user\nq{"name":"ann"}'


def image(number: int, size: int = 6000, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(random.Random(number).randbytes(size)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **more}}


def page(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def test_images_separate_prompts_and_count_no_base64(tmp_path: Path):
    ask = {"type": "text", "text": text(400)}
    log = read(tmp_path, *(page(image(number), ask) for number in (1, 2, 1)))
    length = tokens("user\n") + 1 + tokens(ask["text"])
    assert log.prompt_tokens.tolist() == [length] * 3
    assert reused_tokens(log) == tokens("user\n") + length  # the third repeats the first image
    assert log.unread.left.keys() == {"image"}
    assert 0.7 < log.unread.left["image"] / log.unread.seen < 0.8
    assert log.unread.share == 1
    assert not log.unread.allows_verdict


def test_known_tokens_of_images_are_counted(tmp_path: Path):
    ask = {"type": "text", "text": text(400)}
    log = read(tmp_path, page(image(1), ask), image_tokens=1000)
    assert log.prompt_tokens[0] == tokens("user\n") + 1000 + tokens(ask["text"])
    assert log.unread.allows_verdict
    assert any("1,000 tokens, as workload.log.image_tokens says" in note for note in log.notes)
    sized = read(tmp_path, page(image(1, width=560, height=281), ask))
    head = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (560).to_bytes(4, "big") + (281).to_bytes(4, "big")
    url = f"data:image/png;base64,{base64.b64encode(head + bytes(60)).decode()}"
    png = read(tmp_path, page({"type": "image_url", "image_url": {"url": url}}, ask))
    assert sized.prompt_tokens[0] == png.prompt_tokens[0] == tokens("user\n") + 20 * 11 + tokens(ask["text"])
    assert sized.unread.allows_verdict


def test_unknown_keys_are_listed_and_counted(tmp_path: Path):
    body = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": text(300), "memo": "x" * 40}]}
    log = read(tmp_path, {"id": "r", "request": body | {"persona": text(100, 1), "top_secret": 7, "stop": ["a"]}})
    assert set(log.unread.left) == {"persona", "messages[].memo"}
    assert log.unread.left["persona"] == len(text(100, 1)) + 2
    assert any("persona (1 times" in note for note in log.notes)
    known = read(tmp_path, {"request": body | {"persona": text(100, 1)}}, not_rendered=["persona", "memo"])
    assert known.unread.left == {}


def test_part_of_unknown_length_outweighs_its_bytes(tmp_path: Path):
    bodies = [
        {"model": "m", "input": text(1000, n), **({"previous_response_id": "r"} if n < few else {})}
        for few in (3,)
        for n in range(100)
    ]
    log = read(tmp_path, *bodies)
    assert log.unread.left["previous_response_id"] < 0.01 * log.unread.seen
    assert log.unread.share == 0.03


def chat_folder(folder: Path, *texts: str) -> Path:
    folder.mkdir()
    save_word_tokenizer(folder / "tokenizer.json", *texts)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": QWEN_LIKE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


CONVERSATION = [
    {"role": "system", "content": text(40)},
    {"role": "user", "content": text(9, 1)},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": text(5, 2), "tool_call_id": "c1"},
]


def test_prompt_that_is_json_stays_a_text(tmp_path: Path):
    given = '[{"role": "user", "content": "a text"}]'
    body = {"model": "m", "input": given}
    path = tmp_path / "log"
    rows = [body, {"body": json.dumps(body)}, {"input": json.dumps(body)}, {"request": body}]
    path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows))
    prompts = read_log(path, LogSettings()).source.prompts
    assert [prompt.messages[0].blocks for prompt in prompts] == [(given,)] * 4


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("tools", [[TOOL], []])
def test_template_renders_as_transformers_does(tmp_path: Path, tools: list[Any], thinks: bool):
    transformers = pytest.importorskip("transformers")
    folder = chat_folder(tmp_path / "model", *WORDS, json.dumps(TOOL), "system user assistant tool < > | think call")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    arguments = {"enable_thinking": thinks}
    body = {"messages": CONVERSATION, "tools": tools, "chat_template_kwargs": arguments}
    log = read(tmp_path, body, template=str(folder), piece=1)
    parsed = json.loads(json.dumps(CONVERSATION))
    parsed[2]["tool_calls"][0]["function"]["arguments"] = {"word": "dune"}  # servers parse them before rendering
    expected = oracle.apply_chat_template(
        parsed, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
    )
    assert log.prompt_tokens[0] == len(expected)
    text_of = oracle.apply_chat_template(
        parsed, tools=tools or None, add_generation_prompt=True, tokenize=False, **arguments
    )
    assert prompt_of(body, template=load_tokenizer(folder)) == [("rendered prompt", text_of)]
    assert log.unread.left == {}


def test_template_argument_changes_only_the_end(tmp_path: Path):
    folder = chat_folder(tmp_path / "model", *WORDS, "system user assistant < > | think im_start im_end")
    bodies = [
        {"messages": CONVERSATION[:2], "chat_template_kwargs": {"enable_thinking": bool(n % 2)}} for n in range(4)
    ]
    log = read(tmp_path, *bodies, template=str(folder), piece=1)
    short, long = sorted(set(log.prompt_tokens.tolist()))
    assert reused_tokens(log) == short + short + long
    assert log.ids == Ids.CHAINED  # rendered prompts are not divided
    assert "chat_template_kwargs" in read(tmp_path, *bodies).unread.left


def test_anthropic_body_renders_as_its_chat_form(tmp_path: Path):
    folder = chat_folder(tmp_path / "model", *WORDS, "system user assistant tool look_up find object")
    schema = TOOL["function"]
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"word": "dune"}}
    own = {
        "system": CONVERSATION[0]["content"],
        "tools": [{"name": "look_up", "description": "find", "input_schema": schema["parameters"]}],
        "messages": [
            CONVERSATION[1],
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": text(5, 2)}]},
        ],
    }
    log = read(tmp_path, own, {"messages": CONVERSATION, "tools": [TOOL]}, template=str(folder), piece=1)
    assert reused_tokens(log) == log.prompt_tokens[0] == log.prompt_tokens[1]


def test_image_keeps_its_place_in_a_template(tmp_path: Path):
    folder = chat_folder(tmp_path / "model", *WORDS, "user assistant")
    ask = {"type": "text", "text": text(50)}
    front, back = (
        read(tmp_path, page(*first), page(*second), template=str(folder), piece=1, image_tokens=70)
        for first, second in (((image(1), ask), (image(2), ask)), ((ask, image(1)), (ask, image(2))))
    )
    assert np.ptp(front.prompt_tokens) == 0
    assert reused_tokens(back) - reused_tokens(front) == 50


def test_wrong_template_is_named(tmp_path: Path):
    body = {"messages": CONVERSATION}
    with pytest.raises(ValueError, match=r"^workload.log.template=/nowhere: .* holds no tokenizer.json"):
        read(tmp_path, body, template="/nowhere")
    folder = chat_folder(tmp_path / "model", *WORDS)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no tools') }}")
    with pytest.raises(ValueError, match=r"log.jsonl:1: messages: expected a chat that the template renders.*no tools"):
        read(tmp_path, body, template=str(folder))


VALUES = [None, True, 7, -1.5, "", "t", [], {}, [[]], [None], ["a"], [{"type": "text"}], [{"type": "image"}], {"a": {}}]


KINDS = ("text", "image_url", "tool_use", "tool_result", "document", "thinking", "function_call", "reasoning", 3)
KEYS = ("content", "tool_calls", "output", "summary", "source", "image_url", "arguments", "name", "text", "input")
FIELDS = ("messages", "input", "system", "tools", "instructions", "documents", "prompt", "functions", "usage")


def odd_value(draw: random.Random, depth: int) -> Any:
    if not depth or draw.random() < 0.3:
        return draw.choice(VALUES)
    if draw.random() < 0.4:
        return [odd_value(draw, depth - 1) for _ in range(draw.randrange(3))]
    item = {key: odd_value(draw, depth - 1) for key in draw.sample(KEYS, 3)}
    return item | draw.choice(({}, {"role": "user"}, {"role": 3})) | draw.choice(({}, {"type": draw.choice(KINDS)}))


@pytest.mark.parametrize("rendered", [False, True])
def test_odd_bodies_are_read_or_named(tmp_path: Path, rendered: bool):
    draw = random.Random(0)
    folder = chat_folder(tmp_path / "model", *WORDS)
    bodies: list[dict[str, Any]] = [{"prompt": "a text"}]
    for _ in range(1500):
        odd = {name: odd_value(draw, 3) for name in draw.sample(FIELDS, 3)}
        bodies.append({"model": "m", "messages": [{"role": "user", "content": "x"}]} | odd)
    log = read(tmp_path, *bodies, bad_lines="skip", template=str(folder) if rendered else None)
    assert 400 < log.requests < 1400
    bad = sum(times for name, times in log.unread.places.items() if name.startswith("bad lines"))
    assert log.requests + bad == len(bodies)
