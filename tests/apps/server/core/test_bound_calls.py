"""Calls that a model may make keep to the tools' schemas, in every interface, beside text, schemas and wrong tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import saying_model
from support.processes.running_server import Running, messages, started

import edgedec
from edgedec_apps.call_grammar import bound_calls

pytestmark = pytest.mark.slow

TEMPLATE = "{# <think> <tool_call> tools #}{{ messages[-1].content }}"
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"const": 7}, "unit": {"enum": ["C"]}},
    "required": ["n", "unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
ANSWER = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
SAYS = {
    "?": ["See:", "<tool_call>"],
    "=": ['```json\n{"name": "look"'],
    "%": ["{"],
    "<": ["<tool_call>"],
    "@": ["<think>", "hm", "<tool_call>", "{bad"],
    "!": ['{"name": "loo"}', "."],
    "": [],  # so that a text ends behind its call
}
CALL = [("look", {"n": 7, "unit": "C"})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that calls with wrong arguments."""
    path: Path = tmp_path_factory.mktemp("bound") / "caller.gguf"
    with started(saying_model(path, SAYS, chat_template=TEMPLATE)) as running:
        yield running


def openai(server: Running, text: str, **more: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of a chat."""
    body = {"model": "caller", "messages": messages(text), "tools": [TOOL], "max_tokens": 300} | more
    message = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or []]
    return message["content"] or "", [(each["name"], json.loads(each["arguments"])) for each in calls]


def test_calls_are_valid_in_each_interface(server: Running) -> None:
    """The arguments are those that the schema allows, though the model writes others."""
    text, calls = openai(server, "?")
    assert (text.split(":")[0], calls) == ("See", CALL)
    tool = {"name": "look", "input_schema": PARAMETERS}
    body = {"model": "caller", "messages": messages("?"), "max_tokens": 99}
    blocks = server.client.post("/v1/messages", json=body | {"tools": [tool]}).json()["content"]
    assert [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"] == CALL
    body |= {"tools": [TOOL], "stream": False, "options": {"num_predict": 99}}
    message = server.client.post("/api/chat", json=body).json()["message"]
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in message["tool_calls"]] == CALL
    flat = {"type": "function", "name": "look", "parameters": PARAMETERS}
    body = {"model": "caller", "input": "?", "tools": [flat], "max_output_tokens": 99}
    items = server.client.post("/v1/responses", json=body).json()["output"]
    assert [(i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"] == CALL


def test_a_call_in_a_fence_is_bound_from_the_tools_name_on(server: Running) -> None:
    """The same in an object that an answer begins with; an object that names no tool is what it is without tools."""
    assert openai(server, "=") == ("", CALL)
    plain = openai(server, "!", tools=[])
    assert plain == openai(server, "!") == ('{"name": "loo"}.', [])


def test_an_answer_of_a_schema_beside_calls(server: Running) -> None:
    """With `response_format` the answer is a call or JSON of the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    assert openai(server, "%", response_format=form) == ('{"x": 1}', [])
    assert openai(server, "<", response_format=form)[1] == CALL


def test_the_budget_of_thoughts_ends_within_a_call(server: Running) -> None:
    """What the thoughts' end cuts is thought, and no call; what stands in thoughts is free."""
    body = {"model": "caller", "messages": messages("@"), "tools": [TOOL], "thinking_token_budget": 3}
    choice = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "hm<tool_call>{bad"
    assert not choice["message"].get("tool_calls")
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "stop")


def test_many_tools_of_any_schemas(server: Running) -> None:
    """Schemas that can't be compiled bind nothing but the form of a call; no request is refused for them."""
    ahead = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^(?!x)y"}}}
    large = {"type": "object", "properties": {f"key{i}": {"type": "string", "maxLength": 9} for i in range(4000)}}
    tools = [{"type": "function", "function": {"name": f"tool{i}", "parameters": large}} for i in range(3)]
    tools += [{"type": "function", "function": {"name": "look", "parameters": ahead}}]
    text, _ = openai(server, "?", tools=tools, max_tokens=20)
    assert text.startswith("See")


JSON_CALL, XML_CALL = '{"name": "%s", "arguments": %s}\n</tool_call>', "\n<function=%s>\n%s</function>\n</tool_call>"
DEEP = {"type": "object", "properties": {"n": {"$ref": "#/properties/m"}, "m": {"type": "integer"}}}
LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}}
AHEAD = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(?!x)y"}}}}
LARGE = {"type": "object", "properties": {f"key{i}": {"enum": [f"value{k}" for k in range(9)]} for i in range(1000)}}
N, A, B = "<parameter=n>\n7\n</parameter>\n", "<parameter=a>\n%s\n</parameter>\n", "<parameter=b>\nx\n</parameter>\n"


@pytest.mark.parametrize(
    ("name", "parameters", "arguments", "keyed"),
    [
        ('a"b\\', PARAMETERS, '{"n": 7, "unit": "C"}', ""),
        ("look", LARGE, '{"any": 1}', B),
        ("look", {"type": "object", "additionalProperties": {"type": "string"}}, '{"b": "x"}', B),
        ("look", {"$ref": "#/$defs/x", "$defs": {"x": DEEP}}, '{"n": 7}', N),
        ("look", DEEP, '{"n": 7}', N),
        ("look", LOOP, '{"a": {"a": {}}}', A % '{"a": {}}'),
        ("look", AHEAD, '{"a": ["y"]}', A % '["y"]'),
        ("look", {"type": "object", "properties": {"b": {"enum": 5}}}, '{"b": "x"}', B),
        ("look", {"type": "object", "properties": ["b"], "required": True}, '{"b": "x"}', B),
        ("look", {"type": "object", "properties": {"n": {}}, "required": ["n"], "x-guidance": 5}, '{"n": 7}', N),
    ],
)
def test_what_schemas_allow_may_be_called(
    tmp_path: Path, name: str, parameters: Any, arguments: str, keyed: str
) -> None:
    """Calls that a schema allows are taken, in JSON and in XML, whatever the schema is."""
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
    said = {TEMPLATE: JSON_CALL % (json.dumps(name)[1:-1], arguments)}
    said |= {TEMPLATE.replace("#}", "<parameter= #}"): XML_CALL % (name, keyed)} if keyed else {}
    for template, body in said.items():
        with edgedec.load(saying_model(tmp_path / "m.gguf", SAYS, chat_template=template), runtime="cpu") as engine:
            grammar = bound_calls(engine, tools)
            assert grammar is not None
            for text in (f"<tool_call>{body}", *([f'{{"name": "look", "arguments": {arguments}'] if keyed else [])):
                constraint = engine.requests.constraint_opener(grammar=grammar)()
                assert constraint is not None
                ids = engine.tokenizer.encode(text, add_special=False)
                assert [constraint.allows(ids[:i], ids[i]) for i in range(len(ids))] == [True] * len(ids)
                constraint.close()


@pytest.mark.parametrize("option", [{"ignore_end": True}, {"min_tokens": 3}])
def test_what_says_how_a_text_ends_binds_no_calls(server: Running, option: dict[str, Any]) -> None:
    """The request is answered as without tools; a schema that can't be compiled is refused beside tools, too."""
    more: dict[str, Any] = {**option, "max_tokens": 3, "temperature": 0}
    assert openai(server, "!", **more) == openai(server, "!", **more, tools=[])
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": {"pattern": "(?!x)y"}}}}
    body = {"model": "caller", "messages": messages("%"), "response_format": form, "tools": [TOOL]}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 400
