"""/v1/messages with Anthropic's own client: texts, thoughts, tools, streams, counting, and errors in its form."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import SHOWING, saying_model
from support.processes.running_server import Running, messages, started

from edgedec_apps.server.core.fields import IGNORED_HEADER

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.slow  # importing the client takes seconds

TEMPLATE = (
    "{# it may <think> #}" + SHOWING + "{% if add_generation_prompt and enable_thinking is defined %}"
    "{{ '?' if enable_thinking else ':' }}{% endif %}"
)
CALL = '<tool_call>{"name": "look", "arguments": {"what": "sky"}}</tool_call>'
SAYS = {
    "?": ["<think>", "\nTwo", " and", " two.\n", "</think>", "\n\nFour."],
    "!": ["Let me look.\n", CALL],
    ".": ["Blue", " it is"],
    ":": ["At once"],
    "c": ["de", "f"],
    "-": [],
}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that says what is written above, with a key."""
    path = saying_model(tmp_path_factory.mktemp("anthropic") / "says.gguf", SAYS, chat_template=TEMPLATE)
    with started(path, api_key="sesame") as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[Any]:
    """Anthropic's client, pointed at the server; it sends the key in a header of its own."""
    with anthropic.Anthropic(base_url=running.url, api_key="sesame", max_retries=0, timeout=60) as client:
        yield client


def ask(client: Any, text: str, **fields: Any) -> Any:
    """Return the answer to a chat of one message."""
    return client.messages.create(**{"model": "says", "max_tokens": 50, "messages": messages(text)} | fields)


def test_a_message_has_thoughts_and_a_text(client: Any, running: Running) -> None:
    """The blocks are thinking and text, and the counts are those of the prompt with its system message."""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    reply = ask(client, "2 + 2?", system=system)
    thought, text = reply.content
    assert (thought.type, thought.thinking) == ("thinking", "Two and two.")
    assert (text.type, text.text) == ("text", "Four.")
    assert (reply.role, reply.model, reply.stop_reason, reply.stop_sequence) == ("assistant", "says", "end_turn", None)
    told = [{"role": "system", "content": "Be brief."}, *messages("2 + 2?")]
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(running.engine.chat_ids(told))
    assert reply.usage.output_tokens == 6


def test_a_stream_adds_up(client: Any) -> None:
    """The client's own stream helper makes the whole message of the events."""
    asked: dict[str, Any] = {"model": "says", "max_tokens": 50, "messages": messages("2 + 2?")}
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Four."
        final = stream.get_final_message()
    whole = ask(client, "2 + 2?")
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 6)
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_a_tool_is_used_and_its_result_is_read(client: Any) -> None:
    """A call is a tool_use block, whole and streamed; with a tool_result the model goes on."""
    reply = ask(client, "Look!", tools=[TOOL])
    text, call = reply.content
    assert (text.text, reply.stop_reason) == ("Let me look.", "tool_use")
    assert (call.name, call.input) == ("look", {"what": "sky"})
    asked: dict[str, Any] = {"model": "says", "max_tokens": 50, "messages": messages("Look!"), "tools": [TOOL]}
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[1].input == {"what": "sky"}
    for content in ("blue.", [{"type": "text", "text": "blue."}]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        said = {"role": "assistant", "content": reply.content}
        chat = [*messages("Look!"), said, {"role": "user", "content": [result]}]
        assert ask(client, "", messages=chat, tools=[TOOL]).content[0].text == "Blue it is"


def test_a_tool_is_required(client: Any) -> None:
    """`any` and a named tool hold the model to a call."""
    tool = TOOL | {"input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        call = ask(client, "Hi.", tools=[tool], tool_choice=choice).content[-1]
        assert (call.type, call.name, call.input) == ("tool_use", "look", {})
    assert ask(client, "Hi.", tools=[tool], tool_choice={"type": "none"}).content[0].text == "Blue it is"


def test_why_a_text_ends(client: Any) -> None:
    """A stop sequence is named, a limit is told, and an empty text has no block."""
    stopped = ask(client, "Say.", stop_sequences=["xyz", "it"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("Blue ", "stop_sequence", "it")
    assert ask(client, "Say.", max_tokens=1).stop_reason == "max_tokens"
    assert ask(client, "-").content == []


def test_an_answer_is_continued(client: Any) -> None:
    """A last message of the assistant is the beginning of the answer."""
    chat = [*messages("Say the alphabet"), {"role": "assistant", "content": "abc"}]
    assert ask(client, "", messages=chat).content[0].text == "def"


def test_thinking_is_switched(client: Any, running: Running) -> None:
    """`thinking` and an effort set the template's variable, and a budget ends the thoughts."""
    assert ask(client, "Hi.", thinking={"type": "disabled"}).content[0].text == "At once"
    assert ask(client, "Hi.", output_config={"effort": "high"}).content[0].type == "thinking"
    for tokens, thought in ((1024, "Two and two."), (0, None)):
        budget = {"type": "enabled", "budget_tokens": tokens}
        raw = client.messages.with_raw_response.create(
            model="says", max_tokens=2000, messages=messages("Hi."), thinking=budget
        )
        assert IGNORED_HEADER not in raw.headers
        assert getattr(raw.parse().content[0], "thinking", None) == thought


def test_a_schema(client: Any) -> None:
    """output_config.format holds the answer to a schema, behind what is thought."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    thought, answer = ask(client, "2 + 2?", output_config=config).content
    assert (thought.thinking, answer.text) == ("Two and two.", "{}")


def test_counting_and_listing(client: Any, running: Running) -> None:
    """count_tokens counts what a message's prompt has, tools included; the models are listed."""
    asked: dict[str, Any] = {"model": "says", "messages": messages("Look!"), "tools": [TOOL], "system": "x"}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = ask(client, "", **asked).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert [model.id for model in client.models.list()] == ["says"]


def test_every_field_of_the_client_is_known(client: Any) -> None:
    """What clients send is kept, or named in the header; each parameter of the client's type is one of these."""
    from anthropic.types.message_create_params import MessageCreateParamsBase

    kept: dict[str, Any] = {"max_tokens": 9, "messages": messages("Say."), "model": "says", "system": "x", "tools": []}
    kept |= {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "u"}, "stop_sequences": []}
    kept |= {"thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto"}, "output_config": {}}
    kept |= {"user_profile_id": "u", "workspace_id": "w"}
    ignored = {"container": "c", "diagnostics": {"x": 1}, "inference_geo": "eu", "speed": "fast", "service_tier": "x"}
    assert set(MessageCreateParamsBase.__annotations__) == {*kept, *ignored}
    body = kept | ignored | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    raw = client.messages.with_raw_response.create(model="says", max_tokens=9, messages=[], extra_body=body)
    assert set(raw.headers[IGNORED_HEADER].split(", ")) == {*ignored, "tools[0] (web_search_20250305)"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role is []"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source.type is None"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "content[0].name is missing"),
        ({"system": 5}, "system is 5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop_sequences": [5]}, "stop_sequences is [5]"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"thinking": {"type": "some"}}, "thinking.type is 'some'"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"model": "gpt-x"}, "there is no model 'gpt-x' here"),
    ],
)
def test_errors_have_the_clients_form(client: Any, fields: dict[str, Any], words: str) -> None:
    """A malformed or unsupported field is an error that the client knows, with the field's name."""
    kind = anthropic.NotFoundError if "model" in fields else anthropic.BadRequestError
    for method in (client.messages.create, client.messages.count_tokens):
        asked: dict[str, Any] = {"model": "says", "messages": messages("x")}
        asked |= {"max_tokens": 3} if method == client.messages.create else {}
        with pytest.raises(kind) as caught:
            method(**asked, extra_body=fields)
        assert caught.value.body["type"] == "error"
        found = "not_found_error" if "model" in fields else "invalid_request_error"
        assert caught.value.body["error"]["type"] == found
        assert words in caught.value.body["error"]["message"]


def test_a_wrong_key(running: Running) -> None:
    """Without the key, or with another in either header, the answer is the client's error for that."""
    with (
        anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError, match="API key is wrong"),
    ):
        wrong.messages.create(model="says", max_tokens=1, messages=messages("x"))


def billed(number: int, *, as_text: bool) -> Any:
    """Return a system prompt that begins as Claude Code's does."""
    line, rest = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};", "You write code. " * 20
    return f"{line}\n{rest}" if as_text else [{"type": "text", "text": text} for text in (line, rest)]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_line_for_bills_hides_no_kept_prompt(client: Any, running: Running, as_text: bool) -> None:
    """The line, another one in each request, is left out and named; elsewhere it is text, and an option keeps it."""
    for number in (1, 2):
        raw = client.messages.with_raw_response.create(
            model="says", max_tokens=9, messages=messages("Hi."), system=billed(number, as_text=as_text)
        )
        usage = raw.parse().usage
    assert raw.headers[IGNORED_HEADER] == "system (x-anthropic-billing-header)"
    assert usage.input_tokens <= 2
    assert usage.cache_read_input_tokens > 300
    told = [{"role": "system", "content": "You write code. " * 20}, *messages("Hi.")]
    assert usage.input_tokens + usage.cache_read_input_tokens == len(running.engine.chat_ids(told))
    later = [{"type": "text", "text": "You."}, *billed(3, as_text=False)]
    assert (
        IGNORED_HEADER
        not in client.messages.with_raw_response.create(
            model="says", max_tokens=9, messages=messages("Hi."), system=later
        ).headers
    )


def test_an_option_keeps_the_line_for_bills(tmp_path: Path) -> None:
    """With --keep-billing-header it is a part of the prompt."""
    with started(saying_model(tmp_path / "says.gguf", SAYS, chat_template=TEMPLATE), keeps_billing=True) as running:
        body = {"model": "says", "max_tokens": 9, "messages": messages("Hi."), "system": billed(1, as_text=True)}
        reply = running.client.post("/v1/messages", json=body)
        told = [{"role": "system", "content": body["system"]}, *messages("Hi.")]
        assert reply.json()["usage"]["input_tokens"] == len(running.engine.chat_ids(told))
        assert IGNORED_HEADER not in reply.headers
