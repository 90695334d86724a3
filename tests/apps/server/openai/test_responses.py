"""/v1/responses with OpenAI's own client: texts, thoughts, calls, streams, and conversations that are kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from support.models.saying_model import SHOWING, saying_model
from support.processes.running_server import Running, started

from edgedec_apps.server.core.budget import MemoryBudget
from edgedec_apps.server.core.fields import IGNORED_HEADER
from edgedec_apps.server.openai.response_store import ResponseStore

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{# it may <think> #}" + SHOWING + "{% if add_generation_prompt and enable_thinking is defined %}"
    "{{ '>' if enable_thinking else ':' }}{% endif %}"
)
CALL = '<tool_call>{"name": "look", "arguments": {"what": "sky"}}</tool_call>'
SAYS = {
    "?": ["<think>", "\nTwo", " and", " two", ".\n", "</think>", "\n\nFour."],
    "!": ["Let me look.\n", CALL],
    ".": ["Blue", " it is"],
    "-": [],
    ":": ["At once"],
}
TOOL = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that says what is written above."""
    path = saying_model(tmp_path_factory.mktemp("responses") / "says.gguf", SAYS, chat_template=TEMPLATE)
    with started(path) as server:
        yield server


def n_prompt(server: Running, messages: list[dict[str, Any]]) -> int:
    """Return how many tokens the prompt of these messages has."""
    return len(server.engine.chat_ids(messages))


def test_a_response_has_thoughts_and_a_text(client: Any, server: Running) -> None:
    """What was thought is a reasoning item before the message; the counts and the settings are told."""
    reply = client.responses.create(model="says", input="2 + 2?", instructions="Be brief.", temperature=0)
    thought, message = reply.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Two and two.")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert reply.output_text == "Four."
    assert (reply.status, reply.error, reply.model, reply.instructions) == ("completed", None, "says", "Be brief.")
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert reply.usage.input_tokens == n_prompt(server, told)
    assert (reply.usage.output_tokens, reply.usage.output_tokens_details.reasoning_tokens) == (7, 6)
    assert reply.temperature == 0


def test_a_stream_has_all_events_and_adds_up(client: Any) -> None:
    """The events come in OpenAI's order, numbered, and what the client adds up is the whole answer."""
    asked = {"model": "says", "input": "2 + 2?"}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    thought = [kind for kind in kinds if kind.startswith("reasoning_text")]
    text = [kind for kind in kinds if kind.startswith("output_text")]
    around = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    expected = ["created", "in_progress", *around[0], *thought, *around[1], *around[0], *text, *around[1], "completed"]
    assert kinds == expected
    assert (thought[-1], text[-1]) == ("reasoning_text.done", "output_text.done")
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    for reply in (events[-1].response, final):
        assert reply.output_text == whole.output_text
        assert [item.type for item in reply.output] == ["reasoning", "message"]
        assert reply.output[0].content[0].text == "Two and two."
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
def test_thoughts_are_their_summary_where_one_is_asked_for(client: Any, name: str) -> None:
    """Then the item has them twice, and a stream's events are those of a summary, which clients read."""
    asked = {"model": "says", "input": "2 + 2?", "reasoning": {name: "auto"}}
    whole = client.responses.create(**asked).output[0]
    with client.responses.stream(**asked) as stream:
        events = [event for event in stream if getattr(event, "output_index", 1) == 0]
        streamed = stream.get_final_response().output[0]
    for item in (whole, streamed, events[-1].item):
        assert [(part.type, part.text) for part in item.summary] == [("summary_text", "Two and two.")]
        assert item.content[0].text == "Two and two."
    part, text = "reasoning_summary_part", "reasoning_summary_text"
    kinds = ["output_item.added", f"{part}.added", f"{text}.delta", f"{text}.done", f"{part}.done", "output_item.done"]
    assert list(dict.fromkeys(event.type.removeprefix("response.") for event in events)) == kinds
    assert {event.summary_index for event in events if "summary" in event.type} == {0}
    assert "".join(event.delta for event in events if event.type.endswith("delta")) == "Two and two."


def test_a_tool_is_called_and_its_result_is_read(client: Any, server: Running) -> None:
    """A call is an item of its own, whole and streamed; with its result as an item the model goes on."""
    asked = {"model": "says", "input": [{"role": "user", "content": "Look!"}], "tools": [TOOL]}
    reply = client.responses.create(**asked)
    assert [item.type for item in reply.output] == ["message", "function_call"]
    call = reply.output[1]
    assert (call.name, json.loads(call.arguments)) == ("look", {"what": "sky"})
    events = list(client.responses.create(**asked, stream=True))
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == json.loads(done.arguments) == {"what": "sky"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue."}
    with_items = [*asked["input"], *(item.model_dump(exclude_none=True) for item in reply.output), result]
    by_items = client.responses.create(model="says", input=with_items, tools=[TOOL])
    by_id = client.responses.create(model="says", input=[result], tools=[TOOL], previous_response_id=reply.id)
    assert by_items.output_text == by_id.output_text == "Blue it is"
    assert by_items.usage.input_tokens == by_id.usage.input_tokens
    assert by_id.previous_response_id == reply.id


def test_conversations_go_on_from_what_is_kept(client: Any, server: Running) -> None:
    """A response is kept unless store is false; instructions are not; retrieve and delete know it."""
    first = client.responses.create(model="says", input="2 + 2?", instructions="Be brief.")
    assert client.responses.retrieve(first.id).output_text == "Four."
    second = client.responses.create(model="says", input="And.", previous_response_id=first.id)
    said = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    chat = [{"role": "user", "content": "2 + 2?"}, said, {"role": "user", "content": "And."}]
    assert second.usage.input_tokens == n_prompt(server, chat)
    client.responses.delete(first.id)
    for attempt in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            attempt(first.id)
    with pytest.raises(openai.BadRequestError, match="is not kept here") as caught:
        client.responses.create(model="says", input="And.", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = client.responses.create(model="says", input="And.", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_schema_and_a_required_tool(client: Any) -> None:
    """text.format holds the answer to a schema, as the client's parsing needs it; tool_choice to a call."""
    pydantic = pytest.importorskip("pydantic")
    animal = pydantic.create_model("Animal", legs=(Literal[2, 4], ...), __config__={"extra": "forbid"})
    parsed = client.responses.parse(model="says", input="Hi", text_format=animal).output_parsed
    assert isinstance(parsed, animal)
    tool = TOOL | {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    call = client.responses.create(model="says", input="Hi", tools=[tool], tool_choice="required").output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "look", "{}")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    reply = client.responses.create(model="says", input="Look!", tools=[TOOL], tool_choice=allowed)
    assert reply.output[1].name == "look"


def test_an_answer_that_is_cut_or_empty(client: Any) -> None:
    """At the limit the response is incomplete, in a stream, too; a text of nothing is a message of nothing."""
    asked = {"model": "says", "input": "Say.", "max_output_tokens": 1}
    reply = client.responses.create(**asked)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output_text == "Blue"
    last = list(client.responses.create(**asked, stream=True))[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", "Blue")
    for stream in (False, True):
        found = client.responses.create(model="says", input="-", stream=stream)
        empty = list(found)[-1].response if stream else found
        assert (empty.status, empty.output_text, len(empty.output)) == ("completed", "", 1)


def test_logprobs(client: Any) -> None:
    """`include` asks for log-probabilities, which are those of the tokens."""
    asked = {"model": "says", "input": "Say.", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = client.responses.create(**asked).output[0].content
    assert [entry.token for entry in part.logprobs] == ["Blue", " it is"]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2]


def test_every_field_of_the_client_is_known(client: Any) -> None:
    """What clients send is kept or named in the header; each parameter of the client's type is one of these."""
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    kept: dict[str, Any] = {"input": "Say.", "instructions": "x", "max_output_tokens": 9, "metadata": {"a": "b"}}
    kept |= {"model": "says", "parallel_tool_calls": False, "previous_response_id": None, "prompt_cache_key": "k"}
    kept |= {"prompt_cache_options": {}, "prompt_cache_retention": "24h", "safety_identifier": "u", "store": False}
    kept |= {"stream_options": {}, "temperature": 0, "text": {"format": {"type": "text"}}, "tool_choice": "auto"}
    kept |= {"tools": [], "top_logprobs": 0, "top_p": 1, "user": "u"}
    ignored: dict[str, Any] = {"access_programs": {"x": 1}, "background_options": {"x": 1}, "image": {"x": 1}}
    ignored |= {"context_management": [{"type": "x"}], "max_tool_calls": 3, "moderation": {"model": "x"}}
    ignored |= {"service_tier": "flex", "truncation": "auto"}
    partly: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    partly |= {"reasoning": {"effort": "low", "summary": "auto"}}
    refused = {"background", "conversation", "prompt"}
    assert set(ResponseCreateParamsBase.__annotations__) == {*kept, *ignored, *partly, *refused}
    body = kept | ignored | partly
    body |= {"tools": [{"type": "web_search"}, TOOL], "text": {"verbosity": "low"}}
    reply = client.responses.with_raw_response.create(model="says", input="", extra_body=body)
    named = set(reply.headers[IGNORED_HEADER].split(", "))
    partly_named = {"include (reasoning.encrypted_content)", "text.verbosity", "tools[0] (web_search)"}
    assert named == {*ignored, *partly_named}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": 5, "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "previous_response_id": 5}, "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "odd"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "regex"}}}, "text.format.pattern"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": "x", "text": "short"}, "text"),
        ({"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_refused(server: Running, fields: dict[str, Any], param: str) -> None:
    """A malformed or unsupported field is a 400 that names it."""
    reply = server.client.post("/v1/responses", json={"model": "says"} | fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_the_store_keeps_its_limit_and_gives_way() -> None:
    """The oldest responses are dropped beyond the limit, too large a one is not kept, and requests get its memory."""
    room = MemoryBudget(80_000)
    store = ResponseStore(room)
    for i in range(50):
        store.put({"id": str(i)}, [{"role": "user", "content": "x" * 1000}])
        assert store.n_bytes == room.n_taken <= store.n_most == 10_000
    assert store.get("49") is not None
    assert store.get("0") is None
    store.put({"id": "large"}, [{"role": "user", "content": "x" * 10_000}])
    assert store.get("large") is None
    room.on_shortage()
    assert (store.n_bytes, room.n_taken, store.get("49")) == (0, 0, None)


def test_a_stream_that_fails_says_so(tmp_path: Path) -> None:
    """An error in the middle of a stream is an event of its own, and a response that failed."""
    says = {"x": ["a", "b"], "b": ["a"]}
    path = saying_model(tmp_path / "loop.gguf", says, chat_template=TEMPLATE, n_ctx_train=100_000)
    with (
        started(path, load_options={"n_ctx": 100_000}, timeout_s=0.5) as slow,
        openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        events = list(client.responses.create(model="loop", input="x", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "--timeout" in events[-2].message
