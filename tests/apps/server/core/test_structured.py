"""Structured output and tools through the interfaces."""

import json
from typing import Any

import pytest
from support.processes.running_server import Running, messages

from edgedec.sequence import TokenOutput
from edgedec_apps.server.core.parts import Splitter

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["sky", "sea"]}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}


def ask(server: Running, **fields: Any) -> Any:
    """Return the answer to a chat with these fields, which must be 200."""
    reply = server.client.post("/v1/chat/completions", json={"messages": messages("Hi"), "seed": 4} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_json_under_a_schema(server: Running) -> None:
    """An answer under a schema is valid under it, and the engine's own; ollama's `format` gives the same."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    text = ask(server, response_format=wanted)["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"ok", "n"}
    assert json.loads(text)["n"] in (1, 2, 3)
    assert text == server.engine.chat(messages("Hi"), seed=4, json_schema=SCHEMA).text
    asked = {"model": "tiny", "messages": messages("Hi"), "format": SCHEMA, "options": {"seed": 4}, "stream": False}
    assert server.client.post("/api/chat", json=asked).json()["message"]["content"] == text


def test_a_regular_expression(server: Running) -> None:
    """An answer under a regular expression matches it as a whole."""
    text = ask(server, response_format={"type": "regex", "pattern": "(yes|no), sir"})["choices"][0]["message"][
        "content"
    ]
    assert text in ("yes, sir", "no, sir")


def test_an_invalid_schema_is_a_400(server: Running) -> None:
    """What the compiler of grammars refuses is refused with its words."""
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "no-such-type"}}}
    asked = {"messages": messages("Hi"), "response_format": wanted}
    for stream in (False, True):
        reply = server.client.post("/v1/chat/completions", json=asked | {"stream": stream})
        assert reply.status_code == 400
        assert "schema" in reply.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_required_tool_is_called(server: Running, choice: Any) -> None:
    """With tool_choice the answer is a call, whole and as a stream, with arguments under the tool's schema.

    A schema of answers without calls changes nothing.
    """
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    reply = ask(server, tools=[TOOL], tool_choice=choice, response_format=form)
    message = reply["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert message["content"] is None
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"])["what"] in ("sky", "sea")
    asked = {"messages": messages("Hi"), "seed": 4, "tools": [TOOL], "tool_choice": choice, "stream": True}
    text = server.client.post("/v1/chat/completions", json=asked).text
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    calls = [c for part in parts for c in part["choices"][0]["delta"].get("tool_calls", [])]
    assert [(c["index"], c["function"]) for c in calls] == [(0, call["function"])]
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


NESTED = """{"type": "object", "properties": {"item": {"$ref": "#/$defs/Item"}}, "required": ["item"],
"additionalProperties": false, "$defs": {"Item": {"enum": [[12345678901234567890, 0.12345678901234567890]]}}}"""
DIGITS = '{"item": [12345678901234567890, 0.12345678901234567890]}'


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("chat/completions", '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]', None),
        ("responses", '"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": %s}]', None),
        ("messages", '"max_tokens": 200, "tools": [{"name": "f", "input_schema": %s}]', f'"input": {DIGITS}'),
    ],
)
def test_a_required_tool_has_references_and_long_numbers(
    server: Running, path: str, body: str, answer: str | None
) -> None:
    """In every interface `$defs` belong to the tool, and the client gets each digit."""
    choice = '{"type": "any"}' if path == "messages" else '"required"'
    talk = "" if path == "responses" else f', "messages": {json.dumps(messages("Hi"))}'
    content = f'{{"model": "tiny", "tool_choice": {choice}, {body % NESTED}{talk}}}'
    reply = server.client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    assert (answer or json.dumps(DIGITS)) in reply.text


def test_tools_are_told_to_the_model(server: Running) -> None:
    """The template renders the tools, and earlier calls and their results are messages of the prompt."""
    plain = ask(server, max_tokens=1)["usage"]["prompt_tokens"]
    told = ask(server, max_tokens=1, tools=[TOOL])["usage"]["prompt_tokens"]
    assert told - plain == len("<tools></>") + len(json.dumps([TOOL]).encode())
    assert ask(server, max_tokens=1, tools=[TOOL], tool_choice="none")["usage"]["prompt_tokens"] == plain
    function = {"name": "look", "arguments": '{"what": "sky"}'}
    talk = [
        *messages("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
    ]
    assert ask(server, max_tokens=1, tools=[TOOL], messages=talk)["usage"]["prompt_tokens"] > told


@pytest.mark.slow
def test_a_cut_answer_is_told_and_may_be_closed(server: Running) -> None:
    """At max_tokens the reason is "length", in all interfaces; with `json_close` it is "stop", and the JSON whole."""
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    cut = ask(server, response_format=wanted, max_tokens=12)["choices"][0]
    assert cut["finish_reason"] == "length"
    least = len('{"ok": true, "n": 1}')
    whole = ask(server, response_format=wanted, max_tokens=least + 1, json_close=True)["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert set(json.loads(whole["message"]["content"])) == {"ok", "n"}
    asked = {"prompt": "x", "response_format": wanted, "max_tokens": least + 1, "seed": 4, "json_close": True}
    completed = server.client.post("/v1/completions", json=asked).json()["choices"][0]
    assert (completed["finish_reason"], set(json.loads(completed["text"]))) == ("stop", {"ok", "n"})
    for n, fields, reason in ((12, {}, "length"), (least + 1, {"json_close": True}, "stop")):
        asked = {"model": "tiny", "messages": messages("Hi"), "format": SCHEMA, "stream": False, **fields}
        told = server.client.post("/api/chat", json=asked | {"options": {"seed": 4, "num_predict": n}}).json()
        assert told["done_reason"] == reason
    assert set(json.loads(told["message"]["content"])) == {"ok", "n"}
    called = ask(server, tools=[TOOL], tool_choice="required", max_tokens=60, json_close=True)["choices"][0]
    assert called["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json_close": True}, "json_close needs a JSON schema or a grammar"),
        ({"json_close": "yes", "response_format": {"type": "json_object"}}, "json_close is 'yes'"),
        ({"json_close": True, "response_format": {"type": "json_object"}, "max_tokens": 1}, "the shortest text"),
        ({"response_format": {"type": "regex", "pattern": 5}}, "response_format.pattern is 5"),
        ({"response_format": {"type": "lark"}}, "response_format.grammar is missing"),
        ({"response_format": {"type": "regex", "pattern": "\\"}}, "lone backslash"),
    ],
)
def test_what_cant_be_closed_or_read_is_a_400(server: Running, fields: dict[str, Any], words: str) -> None:
    """By name, before anything is generated."""
    reply = server.client.post("/v1/chat/completions", json={"messages": messages("Hi")} | fields)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_a_tool_that_is_unknown(server: Running) -> None:
    """A choice of a tool that is not given is refused."""
    asked = {"messages": messages("Hi"), "tools": [TOOL], "tool_choice": {"type": "function", "name": "fly"}}
    reply = server.client.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")
    assert "name a tool" in reply.json()["error"]["message"]


def test_calls_are_split_from_text_by_index() -> None:
    """Texts that come in turns keep their calls apart."""
    splitter = Splitter({"look": {}})
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert not splitter.feed(0, TokenOutput(0, "See: " + call[:20])).calls
    assert splitter.feed(1, TokenOutput(0, "no call")).text == "no call"
    assert [found.name for found in splitter.feed(0, TokenOutput(0, call[20:])).calls] == ["look"]
    assert (splitter.count(0), splitter.count(1)) == (1, 0)
    assert Splitter(None).feed(0, TokenOutput(0, call)).text == call
