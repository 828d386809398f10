"""Requests to Gemini and Bedrock, and exports of gateways, with invented contents."""

import json
from typing import Any

ASKED = "which of the two rivers is the longer one, and where does it end?"
RULES = "answer in one sentence, and name the source of each number that you give"
PNG = "iVBORw0KGgoAAAANSUhEUgAAADgAAAAcCAYAAAA="  # the head of an image of 56 x 28 pixels


def gemini_contents(turns: int = 1) -> list[dict[str, Any]]:
    """Return the contents of a request: a question, and with two turns a call of a function with its answer."""
    first = [{"role": "user", "parts": [{"text": ASKED}]}]
    call = {"functionCall": {"name": "length", "args": {"river": "first"}}}
    answer = {"functionResponse": {"name": "length", "response": {"km": 1230}}}
    more = [{"role": "model", "parts": [call]}, {"role": "user", "parts": [answer, {"text": "and now?"}]}]
    return [*first, *more][: 2 * turns - 1]


def gemini_body(turns: int = 1) -> dict[str, Any]:
    return {
        "contents": gemini_contents(turns),
        "systemInstruction": {"parts": [{"text": RULES}]},
        "tools": [{"functionDeclarations": [{"name": "length", "parameters": {"type": "OBJECT"}}]}],
        "generationConfig": {"temperature": 0.5, "stopSequences": ["end"]},
    }


def gemini_usage(prompt: int, cached: int, answer: int, thoughts: int = 0) -> dict[str, int]:
    """Return usageMetadata, which has no counts of zero."""
    counts = {"promptTokenCount": prompt, "cachedContentTokenCount": cached, "candidatesTokenCount": answer}
    counts |= {"thoughtsTokenCount": thoughts, "totalTokenCount": prompt + answer + thoughts}
    return {name: count for name, count in counts.items() if count}


def gemini_lines(*, plain: bool = False) -> list[dict[str, Any]]:
    """Return two requests with their answers, of which the second goes on from the first; `plain`: text alone."""
    text = {"role": "user", "parts": [{"text": ASKED}]}
    return [
        {
            "timestamp": f"2026-11-02T09:00:0{5 * number}Z",
            "request": {"contents": [text, text][: number + 1]} if plain else gemini_body(number + 1),
            "response": {"modelVersion": "m", "usageMetadata": usage},
        }
        for number, usage in enumerate((gemini_usage(90, 0, 6, 4), gemini_usage(120, 64, 7)))
    ]


def converse_messages(turns: int = 1) -> list[dict[str, Any]]:
    """Return messages of Converse, as those of `gemini_contents`."""
    first = [{"role": "user", "content": [{"text": ASKED}, {"cachePoint": {"type": "default"}}]}]
    call = {"toolUse": {"toolUseId": "t1", "name": "length", "input": {"river": "first"}}}
    answer = {"toolResult": {"toolUseId": "t1", "content": [{"json": {"km": 1230}}], "status": "success"}}
    more = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer, {"text": "and now?"}]}]
    return [*first, *more][: 2 * turns - 1]


def converse_body(turns: int = 1) -> dict[str, Any]:
    spec = {"name": "length", "inputSchema": {"json": {"type": "object"}}}
    return {
        "messages": converse_messages(turns),
        "system": [{"text": RULES}, {"cachePoint": {"type": "default"}}],
        "toolConfig": {"tools": [{"toolSpec": spec}, {"cachePoint": {"type": "default"}}], "toolChoice": {"auto": {}}},
        "inferenceConfig": {"maxTokens": 100},
    }


def converse_usage(fresh: int, cached: int, created: int, output: int) -> dict[str, int]:
    total = fresh + cached + created + output
    counts = {"inputTokens": fresh, "outputTokens": output, "totalTokens": total}
    return counts | {"cacheReadInputTokens": cached, "cacheWriteInputTokens": created}


def plain_body(turns: int = 1) -> dict[str, Any]:
    """Return a body of Converse with text alone."""
    text = {"role": "user", "content": [{"text": ASKED}]}
    return {"messages": [text, text][:turns], "inferenceConfig": {"maxTokens": 100}}


def converse_lines(*, plain: bool = False) -> list[dict[str, Any]]:
    """Return two requests of Converse with their answers; `plain`: text alone."""
    body, usages = plain_body if plain else converse_body, (converse_usage(8, 0, 80, 6), converse_usage(20, 80, 10, 7))
    return [
        {"timestamp": 1_793_600_000 + number, "modelId": "m", **body(number + 1), "response": {"usage": usage}}
        for number, usage in enumerate(usages)
    ]


def invocation(name: str, second: int, body: Any, usage: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return a record of an invocation, as Bedrock logs it."""
    entered = {
        "inputContentType": "application/json",
        "inputBodyJson": body,
        "inputTokenCount": usage["inputTokens"],
        "cacheReadInputTokenCount": usage["cacheReadInputTokens"],
        "cacheWriteInputTokenCount": usage["cacheWriteInputTokens"],
    }
    answer = {"output": {"message": {"role": "assistant", "content": [{"text": "x"}]}}, "metrics": {"latencyMs": 1500}}
    return {
        "schemaType": "ModelInvocationLog",
        "schemaVersion": "1.0",
        "timestamp": f"2026-11-02T09:00:{second:02}Z",
        "accountId": "1",
        "identity": {"arn": "role/ann"},
        "region": "eu-central-1",
        "requestId": name,
        "operation": "Converse",
        "modelId": "m",
        "input": entered,
        "output": {"outputBodyJson": answer | {"usage": usage}, "outputTokenCount": usage["outputTokens"]},
    } | more


def invocations(*, plain: bool = False) -> list[dict[str, Any]]:
    """Return two records of invocations, the newest first; `plain`: text alone."""
    body = plain_body if plain else converse_body
    return [
        invocation("b", 5, body(2), converse_usage(20, 80, 10, 7)),
        invocation("a", 0, body(1), converse_usage(8, 0, 80, 6)),
    ]


# ------------------------------------------------------------------------------
# Exports of gateways: the prompts of two requests of chat completions.
# ------------------------------------------------------------------------------


def chat_body(turns: int = 1) -> dict[str, Any]:
    first = [{"role": "user", "content": ASKED}]
    more = [{"role": "assistant", "content": "the first"}, {"role": "user", "content": "and now?"}]
    return {"model": "m", "messages": [*first, *more][: 2 * turns - 1]}


def chat_usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


def helicone_row(name: str, second: int, body: Any, usage: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Return a row of Helicone, whose own count of the prompt has no cached tokens."""
    counted = usage or chat_usage(60, 32, 7)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "response_id": f"{name}-answer",
        "response_created_at": f"2026-11-02 09:00:{second + 2:02}.000",
        "response_body": {"usage": usage},
        "response_status": 200,
        "response_model": "m",
        "request_id": name,
        "request_created_at": f"2026-11-02 09:00:{second:02}.000",
        "request_body": body,
        "request_path": "https://api.example.com/v1/chat/completions",
        "request_user_id": "ann",
        "request_properties": {"Helicone-Session-Id": "s"},
        "provider": "OPENAI",
        "delay_ms": 2000,
        "time_to_first_token": 500,
        "prompt_tokens": counted["prompt_tokens"] - cached,
        "prompt_cache_read_tokens": cached,
        "prompt_cache_write_tokens": None,
        "completion_tokens": counted["completion_tokens"],
        "total_tokens": counted["prompt_tokens"] - cached + counted["completion_tokens"],
        "cache_reference_id": "00000000-0000-0000-0000-000000000000",
    } | more


def helicone_lines() -> list[dict[str, Any]]:
    """Return two rows, the newest first."""
    return [
        helicone_row("b", 5, chat_body(2), chat_usage(60, 32, 7)),
        helicone_row("a", 0, chat_body(1), chat_usage(40, 0, 6)),
    ]


def portkey_row(name: str, second: int, body: Any, usage: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a line of an export of Portkey."""
    return {
        "id": name,
        "trace_id": "s",
        "created_at": f"2026-11-02T09:00:{second:02}Z",
        "request": {"url": "u", "body": body},
        "response": {"status": 200, "body": {"usage": usage}},
        "is_success": 1,
        "ai_model": "m",
        "req_units": usage["prompt_tokens"],
        "res_units": usage["completion_tokens"],
        "request_url": "https://api.example.com/v1/chat/completions",
        "response_time": 2000,
        "metadata": json.dumps({"_user": "ann"}),
    } | more


def portkey_lines() -> list[dict[str, Any]]:
    """Return two lines of an export."""
    return [
        portkey_row("a", 0, chat_body(1), chat_usage(40, 0, 6)),
        portkey_row("b", 5, chat_body(2), chat_usage(60, 32, 7)),
    ]


def openrouter_lines() -> list[dict[str, Any]]:
    """Return records of two generations."""
    return [
        {
            "id": f"gen-{number}",
            "model": "m",
            "created_at": f"2026-11-02T09:00:0{number}.433273+00:00",
            "native_tokens_prompt": prompt,
            "native_tokens_completion": 5 + number,
            "native_tokens_cached": cached,
            "tokens_prompt": prompt - 3,
        }
        for number, (prompt, cached) in enumerate(((40, 0), (48, 32)))
    ]
