"""Requests as known programs send them: each is answered, and what is ignored is exactly what its file says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.running_server import Running, messages, started, wait_until

from edgedec_apps.server.core.fields import IGNORED_HEADER, Fields
from edgedec_apps.server.core.known_fields import HONOURED, INTERFACES, TABLE
from edgedec_apps.server.openai.responses_items import read_input

CLIENTS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("clients/*")}
ADDRESSES = dict(
    zip(INTERFACES, ("chat/completions", "completions", "responses", "messages", "/api/chat"), strict=True)
)
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": messages("x"), "max_tokens": 1},
    "completions": {"prompt": "x", "max_tokens": 1},
    "responses": {"input": "x", "max_output_tokens": 1, "store": False},  # what is kept would take memory
    "messages": {"messages": messages("x"), "max_tokens": 1},
    "ollama": {"model": "tiny", "messages": messages("x"), "stream": False, "options": {"num_predict": 1}},
}


def ignored(reply: Any) -> list[str]:
    """Return the fields that an answer says were ignored, in the order of the alphabet."""
    assert reply.status_code == 200, reply.text
    return sorted(filter(None, reply.headers.get(IGNORED_HEADER, "").split(", ")))


def post(server: Running, interface: str, **more: Any) -> Any:
    """Return the answer to a short request of an interface with more fields."""
    address = ADDRESSES[interface]
    return server.client.post(address if address[0] == "/" else f"/v1/{address}", json=LEAST[interface] | more)


@pytest.fixture(scope="module")
def roomy(chat_path: Path) -> Iterator[Running]:
    """A server of the tiny model with a longer context, as each character is a token of it."""
    with started(chat_path, load_options={"n_ctx": 4096}) as running:
        yield running


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_what_a_client_sends(roomy: Running, name: str) -> None:
    """The answer is a 200, and its header names what was ignored."""
    client = CLIENTS[name]
    assert ignored(roomy.client.post(client["address"], json=client["body"])) == sorted(client["ignored"])


@pytest.mark.parametrize("interface", INTERFACES)
def test_every_unknown_field_is_ignored_by_name(
    server: Running, interface: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the top, in messages, parts, tools and options, whatever the value; null is nothing."""
    caplog.set_level("INFO", "edgedec.server")
    new: dict[str, Any] = {"new": False, "none": None}
    assert ignored(post(server, interface, **new)) == ["new"]
    wait_until(lambda: "these fields were ignored: new" in caplog.text, "it is not in the log")
    within = dict.fromkeys(("chat", "messages", "ollama"), "messages") | {"responses": "input"}
    if (chat := within.get(interface)) is not None:
        parts = [{"type": "input_text" if chat == "input" else "text", "text": "x"} | new, {"type": "hologram"}]
        more: dict[str, Any] = {chat: [{"role": "user", "content": parts} | new] * 2}
        function = {"name": "f", "description": "d"} | new
        more["tools"] = [{"type": "function", "function": function} if interface in ("chat", "ollama") else function]
        more["options"] = {"num_predict": 1} | new
        expected = [f"{chat}[0].content[0].new", f"{chat}[0].content[1] (hologram)", f"{chat}[0].new"]
        expected.append("options.new" if interface == "ollama" else "options")
        expected.append("tools[0].function.new" if interface in ("chat", "ollama") else "tools[0].new")
        assert ignored(post(server, interface, **more)) == sorted(expected)


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_table_says_what_is_read(server: Running, interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interface reads is honoured by the table, and what the table honours is read."""
    names = set[str]()
    take = Fields.take

    def noting(self: Fields, name: str) -> Any:
        names.add(self.path(name))
        return take(self, name)

    monkeypatch.setattr(Fields, "take", noting)
    assert post(server, interface).status_code == 200
    if interface == "ollama":
        generated = LEAST["ollama"] | {"prompt": "x", "messages": None}
        assert server.client.post("/api/generate", json=generated).status_code == 200
    honoured = {name for (of, name), outcome in TABLE.items() if (of, outcome) == (interface, HONOURED)}
    read_in_objects = {name for name in honoured if "." in name and not name.startswith("options.")}
    of_others = {"input_prefix", "input_suffix", "input_extra", "prediction", "refine"}  # of /infill; where not empty
    of_others |= {"repeat_penalty", "repeat_last_n", "ignore_eos", "n_predict", "stop_sequences"}  # names for others
    assert honoured - read_in_objects - of_others - names == set()
    assert {name for name in names if "." not in name or name.startswith("options.")} - honoured == set()


@pytest.mark.parametrize(
    ("interface", "more", "names"),
    [
        ("chat", {"max_tokens": 1.0, "n": 1.0, "top_k": 40.0}, []),
        ("chat", {"stop": "", "temperature": "", "tools": "", "seed": ""}, []),
        ("chat", {"messages": [{"role": "user", "content": None}, {"role": "tool", "content": None}]}, []),
        ("chat", {"seed": -(2**63)}, []),
        ("chat", {"stream_options": None, "tools": None, "tool_choice": "", "logit_bias": "", "keep_alive": ""}, []),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "auto"}}, []),
        ("completions", {"stop": ["", ""], "best_of": 1.0, "logprobs": False}, []),
        (
            "responses",
            {"input": [{"role": "user", "content": None}], "max_output_tokens": 1.0, "previous_response_id": ""},
            [],
        ),
        ("messages", {"system": None, "messages": [{"role": "user", "content": None}], "stop_sequences": [""]}, []),
        ("ollama", {"options": {"num_predict": 1.0, "stop": [""], "seed": -2, "top_p": 0}, "format": ""}, []),
        ("chat", {"stream_options": {"include_usage": True}}, ["stream_options"]),
        ("chat", {"top_logprobs": 2}, ["top_logprobs"]),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, ["tools[0] (custom)"]),
        ("chat", {"enable_thinking": True}, ["enable_thinking"]),
        ("chat", {"reasoning": {"effort": "low"}}, ["reasoning.effort"]),
        ("chat", {"chat_template_kwargs": {"x": 1}, "client_metadata": {}}, ["chat_template_kwargs.x"]),
        ("completions", {"messages": messages("x")}, ["messages"]),
        ("responses", {"chat_template_kwargs": {"enable_thinking": True}}, ["chat_template_kwargs.enable_thinking"]),
        ("messages", {"thinking": {"type": "enabled"}}, ["thinking.type"]),
        ("messages", {"system": [{"type": "image"}, {"type": "text", "text": "x"}]}, ["system[0] (image)"]),
        ("ollama", {"think": "high", "tool_choice": "required", "shift": True}, ["shift", "think", "tool_choice"]),
    ],
)
def test_values_that_clients_send_are_taken_or_named(
    server: Running, interface: str, more: dict[str, Any], names: list[str]
) -> None:
    """Whole numbers as floats, empty texts for nothing, null contents and negative seeds are taken.

    Hints that the template lacks, and fields without the one that they belong to, are named and not refused.
    """
    assert ignored(post(server, interface, **more)) == names


def test_the_most_probable_token_and_negative_seeds(server: Running) -> None:
    """top_p of 0 is temperature 0, and a negative seed stands for its 64 bits, in every interface that has them."""

    def text(**more: Any) -> str:
        chat = post(server, "chat", max_tokens=8, **more).json()["choices"][0]["message"]["content"]
        options = {"num_predict": 8, **more}
        assert post(server, "ollama", options=options).json()["message"]["content"] == chat
        said = post(server, "messages", max_tokens=8, **more).json()["content"]
        assert "".join(block["text"] for block in said) == chat
        return str(chat)

    assert text(top_p=0, temperature=1.5, seed=5) == text(temperature=0)
    assert text(temperature=1.5, seed=-2) == text(temperature=1.5, seed=2**64 - 2) != text(temperature=1.5, seed=2)


@pytest.mark.parametrize(
    ("more", "texts"),
    [
        ({"guided_json": {"enum": [1, 2]}}, ("1", "2")),
        ({"guided_json": '{"enum": [1, 2]}'}, ("1", "2")),
        ({"guided_regex": "[ab]c"}, ("ac", "bc")),
        ({"guided_choice": ["a b.", "c|d"]}, ("a b.", "c|d")),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, ("1", "2")),
        ({"structured_outputs": {"regex": "[ab]c", "new": 1}}, ("ac", "bc")),
        ({"structured_outputs": {"choice": ["x"]}}, ("x",)),
    ],
)
@pytest.mark.parametrize("interface", ["chat", "completions"])
def test_vllms_structured_outputs(server: Running, interface: str, more: dict[str, Any], texts: tuple[str]) -> None:
    """A schema as an object or a text, a pattern, and texts to choose from hold the answer."""
    (choice,) = post(server, interface, max_tokens=9, **more).json()["choices"]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) in texts


def test_least_tokens(server: Running) -> None:
    """min_tokens rules out the tokens that end a text; a grammar, which decides itself, refuses it by name."""
    ends = [i for i in range(server.engine.tokenizer.n_vocab) if server.engine.tokenizer.is_end(i)]
    bias = {"logit_bias": {str(i): 100 for i in ends}, "temperature": 0, "max_tokens": 9}
    for interface in ("chat", "completions"):
        counts = [
            post(server, interface, **bias, **more).json()["usage"]["completion_tokens"]
            for more in ({}, {"min_tokens": 0}, {"min_tokens": 5.0}, {"min_tokens": 20})
        ]
        assert counts[0] == counts[1] < 5
        assert counts[2:] == [counts[0] + 5, 9]
    reply = post(server, "chat", min_tokens=3, response_format={"type": "json_object"})
    assert (reply.status_code, "min_tokens" in reply.json()["error"]["message"]) == (400, True)


def test_items_of_other_tools_are_calls() -> None:
    """A call of a tool that is no function, and its output, are told to the template as those of a function."""
    items = [
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "2", "output": {"exit": 0}},
    ]
    first, said, second, done = read_input(Fields({"input": items}, interface="responses"))
    assert first["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "x"}}
    assert (said["content"], said["tool_call_id"]) == ("y", "1")
    assert second["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": {"command": ["ls"]}}
    assert (done["content"], done["tool_call_id"]) == ('{"exit": 0}', "2")


@pytest.mark.parametrize("address", ["", "/v1", "/v1/v1"])
@pytest.mark.parametrize("interface", INTERFACES[:4])
def test_a_base_url_without_version(server: Running, interface: str, address: str) -> None:
    """/v1 may be missing or there twice; errors have the interface's form there, too."""
    path = f"{address}/{ADDRESSES[interface]}"
    assert server.client.post(path, json=LEAST[interface]).status_code == 200
    refused = server.client.post(path, json=LEAST[interface] | {"temperature": -1}).json()
    assert ("type" in refused) == (interface == "messages")
    assert server.client.get(f"{address}/models").json()["data"][0]["id"] == "tiny"


def test_a_prompt_that_is_too_long(server: Running) -> None:
    """The words and codes are those that OpenAI's clients, and Claude Code, look for."""
    long = messages("x " * 2000)
    for interface, more in (("chat", {"messages": long}), ("completions", {"prompt": "x " * 2000})):
        error = post(server, interface, **more).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your messages ")
    error = post(server, "messages", messages=long, stream=True)
    assert (error.status_code, error.json()["error"]["type"]) == (400, "invalid_request_error")
    words = error.json()["error"]["message"].split()
    assert words[:4] == ["prompt", "is", "too", "long:"]
    assert (int(words[4]) > int(words[7]), words[7], words[8]) == (True, "511", "maximum:")
    many = post(server, "messages", messages=messages("x") * 5000).json()["error"]["message"]
    assert many.startswith("prompt is too long: the chat has 5000 messages")


def test_a_tool_call_with_broken_json(server: Running) -> None:
    """What a model wrote is passed on as text; what is no object, too; nothing is no argument."""
    lengths = []
    written: list[Any] = ["{}", "", "null", None, [], '{"path": "a', "[1]", "5", '{"a": NaN}', '{"a": "\\ud800"}']
    for arguments in written:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [*messages("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        chat.append({"role": "tool", "tool_call_id": "c", "content": "no JSON"})
        for interface in ("chat", "ollama"):
            assert post(server, interface, messages=chat).status_code == 200
        items = [*messages("x"), {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]
        assert post(server, "responses", input=items).status_code == 200
        blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": arguments}]
        told = [*messages("x"), {"role": "assistant", "content": blocks}, *messages("y")]
        lengths.append(post(server, "messages", messages=told).json()["usage"]["input_tokens"])
    assert len(set(lengths)) == 1  # this template shows no calls


FORMS: list[dict[str, Any]] = [{}, *({"parameters": form} for form in (None, {}, {"type": "object"}))]
FORMS += [{"parameters": {"type": "object", "properties": None, "required": None}}]


@pytest.mark.parametrize("form", FORMS)
def test_tools_without_parameters(server: Running, form: dict[str, Any]) -> None:
    """A forced call has the arguments {}, however an interface says that there are no parameters."""
    function = {"name": "f", "description": "d"} | form
    chat = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 60}
    (call,) = post(server, "chat", **chat).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}
    flat = {"tools": [{"type": "function"} | function], "tool_choice": "required", "max_output_tokens": 60}
    assert json.loads(post(server, "responses", **flat).json()["output"][0]["arguments"]) == {}
    schema = {"input_schema": function["parameters"]} if "parameters" in function else {}
    asked = {"tools": [{"name": "f"} | schema], "tool_choice": {"type": "any"}, "max_tokens": 60}
    assert post(server, "messages", **asked).json()["content"][0]["input"] == {}
    assert post(server, "ollama", tools=[{"type": "function", "function": function}]).status_code == 200
    assert server.engine.requests.render(messages("x"), tools=[{"type": "function", "function": function}])


def test_allowed_tools(server: Running) -> None:
    """The model is told, and may call, only the tools that tool_choice allows, in both of OpenAI's forms."""
    functions: list[dict[str, Any]] = [{"name": name, "parameters": {}} for name in ("first", "second")]
    nested = [{"type": "function", "function": function} for function in functions]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "second"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    reply = post(server, "chat", tools=nested, tool_choice=choice, max_tokens=60).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    alone = post(server, "chat", tools=nested[1:], tool_choice="required", max_tokens=60).json()
    assert (call["function"]["name"], reply["usage"]["prompt_tokens"]) == ("second", alone["usage"]["prompt_tokens"])
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "second"}]}
    asked = {"tools": [{"type": "function"} | each for each in functions], "tool_choice": flat, "max_output_tokens": 60}
    assert post(server, "responses", **asked).json()["output"][0]["name"] == "second"
    none = {"type": "allowed_tools", "allowed_tools": {"tools": []}}
    assert post(server, "chat", tools=nested, tool_choice=none).status_code == 400
