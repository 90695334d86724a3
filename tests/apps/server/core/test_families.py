"""The marks of families of models in every interface: what is thought and what is called, whole and as a stream."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import saying_model
from support.processes.running_server import Running, messages, started

from edgedec_apps.reply_marks import MARKS
from edgedec_apps.server.core.prompts import continued

pytestmark = pytest.mark.slow

# Of the templates of these models, only what the interfaces look at.
TEMPLATES = {
    "gemma4": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking | default(false) %}"
        "<|channel>thought\n<channel|>{% else %}={% endif %}{% endif %}"
    ),
    "lfm2": (
        "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}{# <think> #}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{# [THINK] [TOOL_CALLS] #}"
        "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{% if add_generation_prompt %}={% endif %}"
    ),
    "harmony": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort }}{# <|channel|>analysis #}"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
SAYS = {
    "gemma4": ["<|channel>", "thought", "\nI ", "look.\n", "<channel|>", "See:", "<|tool_call>", "call:look{", "n:7}"],
    "lfm2": ["<think>", "I ", "look.", "</think>", "See:", "<|tool_call_start|>", "[look(n=", "7)]"],
    "mistral": ["[THINK]", "I ", "look.", "[/THINK]", "See:", "[TOOL_CALLS]", "look", "[ARGS]", '{"n": ', "7}"],
    "harmony": [
        *(
            "<|channel|>analysis<|message|>I ",
            "look.",
            "<|end|><|start|>assistant<|channel|>comm",
            "entary<|message|>See:",
        ),
        *(
            "<|end|>\n<|start|>assistant<|channel|>commentary to=functions.",
            "look",
            " <|constrain|>json<|message|>",
            '{"n',
            '": 7}',
        ),
    ],
}
CLOSED = {"gemma4": ["<tool_call|>"], "lfm2": ["<|tool_call_end|>"], "mistral": [], "harmony": ["<|call|>"]}
LAST = {"gemma4": "=", "lfm2": "=", "mistral": "=", "harmony": "t"}
CONTROL = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
)
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
FOUND = ("I look.", "See:", [("look", {"n": 7})])


@pytest.fixture(scope="module", params=list(TEMPLATES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model of each family, whose marks are control tokens that add nothing to a text."""
    name = request.param
    path: Path = tmp_path_factory.mktemp("family") / "family.gguf"
    says = {LAST[name]: SAYS[name] + CLOSED[name]}
    with started(saying_model(path, says, chat_template=TEMPLATES[name], control=CONTROL)) as running:
        yield running


def events(reply: Any) -> list[dict[str, Any]]:
    """Return the JSON of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def asked(**more: Any) -> dict[str, Any]:
    """Return the body of a request that lets the model think."""
    return {"model": "family", "messages": messages("?"), "chat_template_kwargs": {"enable_thinking": True}} | more


def test_openai(family: Running) -> None:
    """`reasoning_content`, `content` and `tool_calls`."""
    whole = family.client.post("/v1/chat/completions", json=asked(tools=[TOOL])).json()["choices"][0]
    message = whole["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert (message["reasoning_content"], message["content"], calls) == FOUND
    assert whole["finish_reason"] == "tool_calls"
    parts = events(family.client.post("/v1/chat/completions", json=asked(tools=[TOOL], stream=True)))
    deltas = [part["choices"][0]["delta"] for part in parts]
    text = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content")}
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for delta in deltas
        for c in delta.get("tool_calls", [])
    ]
    assert (text["reasoning_content"], text["content"], calls) == FOUND


def test_anthropic(family: Running) -> None:
    """Blocks of thinking, text and tool_use."""
    tool = {"name": "look", "input_schema": PARAMETERS}
    body = asked(tools=[tool], max_tokens=99)
    whole = family.client.post("/v1/messages", json=body).json()
    kinds = {block["type"]: block for block in whole["content"]}
    use = kinds["tool_use"]
    assert (kinds["thinking"]["thinking"], kinds["text"]["text"], [(use["name"], use["input"])]) == FOUND
    assert whole["stop_reason"] == "tool_use"
    found = events(family.client.post("/v1/messages", json=body | {"stream": True}))
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    text = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("thinking", "text", "partial_json")}
    assert (text["thinking"], text["text"], json.loads(text["partial_json"])) == (*FOUND[:2], {"n": 7})


def test_ollama(family: Running) -> None:
    """`thinking`, `content` and `tool_calls` of the message."""
    body = asked(tools=[TOOL], stream=False)
    del body["chat_template_kwargs"]
    body |= {"think": True}
    reply = family.client.post("/api/chat", json=body)
    if reply.status_code == 400:  # these templates have no variable for it
        del body["think"]
        reply = family.client.post("/api/chat", json=body)
    message = reply.json()["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert (message["thinking"], message["content"], calls) == FOUND
    lines = family.client.post("/api/chat", json=body | {"stream": True}).text.splitlines()
    parts = [json.loads(line)["message"] for line in lines]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for part in parts for c in part.get("tool_calls", [])]
    assert ("".join(p.get("thinking", "") for p in parts), "".join(p["content"] for p in parts), calls) == FOUND


def test_responses(family: Running) -> None:
    """Items of reasoning, message and function_call."""
    tool = {"type": "function", "name": "look", "parameters": PARAMETERS}
    body = {"model": "family", "input": "?", "tools": [tool], "chat_template_kwargs": {"enable_thinking": True}}
    streamed = events(family.client.post("/v1/responses", json=body | {"stream": True}))[-1]["response"]
    for document in (family.client.post("/v1/responses", json=body).json(), streamed):
        items = {item["type"]: item for item in document["output"]}
        call = items["function_call"]
        assert (
            items["reasoning"]["content"][0]["text"],
            items["message"]["content"][0]["text"],
            [(call["name"], json.loads(call["arguments"]))],
        ) == FOUND


@pytest.mark.parametrize(
    ("name", "prompt", "opened", "begun", "expected"),
    [
        ("think", "=", "", {"content": "Ab"}, ("=Ab", "")),
        ("think", "=", "", {"content": "Ab", "reasoning_content": "x"}, ("=<think>\nx\n</think>\n\nAb", "")),
        ("think", "=", "", {"content": "", "reasoning_content": "x"}, ("=<think>\nx", "<think>")),
        ("think", "=<think>\n", "<think>", {"content": "Ab"}, ("=<think>\n\n</think>\n\nAb", "")),
        ("think", "=<think>\n", "<think>", {"content": "<think>Ab"}, ("=<think>Ab", "<think>")),
        ("gemma4", "=", "", {"content": "Ab", "reasoning_content": "x"}, ("=<|channel>thought\nx\n<channel|>Ab", "")),
        ("gemma4", "=", "", {"content": "", "reasoning_content": "x"}, ("=<|channel>thought\nx", "<|channel>thought")),
        ("mistral", "=", "", {"content": "Ab", "reasoning_content": "x"}, ("=[THINK]x[/THINK]Ab", "")),
        ("harmony", "=A", "A", {"content": "Ab"}, ("=A<|channel|>final<|message|>Ab", "")),
        (
            *("harmony", "=A", "A", {"content": "Ab", "reasoning_content": "x"}),
            ("=A<|channel|>analysis<|message|>x<|end|>A<|channel|>final<|message|>Ab", ""),
        ),
        (
            *("harmony", "=A", "A", {"content": "", "reasoning_content": "x"}),
            ("=A<|channel|>analysis<|message|>x", "<|channel|>analysis<|message|>"),
        ),
    ],
)
def test_a_begun_answer(name: str, prompt: str, opened: str, begun: dict[str, Any], expected: tuple[str, str]) -> None:
    """It stands where the family has its answer, behind what was thought; the reply goes on where it ends."""
    mark = next(mark for mark in MARKS[name] if mark.kind == "thinking")
    long, short = "<|start|>assistant", "A"
    found, behind = continued(prompt.replace(short, long), begun, opened.replace(short, long), mark)
    assert (found.replace(long, short), behind) == expected


def test_without_tools_and_under_a_schema(family: Running, request: pytest.FixtureRequest) -> None:
    """What is thought stands apart; a JSON schema binds the answer behind it, and a budget ends it.

    The model of channels says several marks with one token, which no end of thoughts may be: it answers at once.
    """
    message = family.client.post("/v1/chat/completions", json=asked()).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"][:4]) == FOUND[:2]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}
    for budget in (0, 3, 99):
        body = asked(response_format=schema, thinking_token_budget=budget, temperature=0)
        whole = family.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        parts = events(family.client.post("/v1/chat/completions", json=body | {"stream": True}))
        deltas = [part["choices"][0]["delta"] for part in parts]
        for key in ("reasoning_content", "content"):
            assert "".join(delta.get(key) or "" for delta in deltas) == whole.get(key, "")
        assert whole["content"] == "7"
        if "harmony" not in request.node.name:
            assert whole.get("reasoning_content", "") == ("I look." if budget else "")
