"""What a model thinks before it answers: apart from the answer in every interface, and switched on and off."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import saying_model
from support.processes.running_server import Running, messages, started

from edgedec.errors import RequestError
from edgedec.sequence import Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec_apps.replies import Parts, split_reply
from edgedec_apps.reply_marks import MARKS, opened_mark
from edgedec_apps.server.core.fields import IGNORED_HEADER
from edgedec_apps.server.core.parts import Splitter

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif '#' in messages[-1].content %}<think>\n{% endif %}{% endif %}"
)
CALL = '<tool_call>{"name": "look", "arguments": {"what": "sky"}}</tool_call>'
SAYS = {
    "?": ["<think>", "\nTwo", " and", " two", ".\n", "</think>", "\n\nFour", "."],
    "!": ["\n<think>", "I must", " look.", "</think>\n", CALL],
    "\n": ["Yes", "."],
    "c": [" more"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def thinker_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks, and whose template can switch that off."""
    return saying_model(tmp_path_factory.mktemp("thinker") / "thinker.gguf", SAYS, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def thinker(thinker_path: Path) -> Iterator[Running]:
    """A server of this model."""
    with started(thinker_path) as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(thinker: Running) -> Iterator[Any]:
    """OpenAI's client, pointed at the server."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def ollama_client(thinker: Running) -> Iterator[Any]:
    """ollama's client, pointed at the server."""
    client = pytest.importorskip("ollama").Client(host=thinker.url, timeout=60)
    yield client
    client.close()


def test_a_stream_of_parts_is_the_whole() -> None:
    """Thoughts, text and calls come in any pieces as they come in one; a second call is dropped where one may be."""
    text = f"<think>Look.</think>See: {CALL} {CALL}"
    for one_call, n_calls in ((False, 2), (True, 1)):
        outputs = tuple(TokenOutput(0, character) for character in text)
        generation = Generation(text, (), "stop", DecodeStats(), outputs)
        whole = Splitter({"look": {}}, thinks=True, one_call=one_call).whole(0, generation)
        assert (whole.thinking, whole.text, len(whole.calls)) == ("Look.", "See:", n_calls)
        splitter = Splitter({"look": {}}, thinks=True, one_call=one_call)
        parts = [splitter.feed(0, output) for output in outputs] + [splitter.finish(0)]
        assert "".join(part.thinking for part in parts) == whole.thinking
        assert "".join(part.text for part in parts) == whole.text
        assert [call for part in parts for call in part.calls] == whole.calls
        assert splitter.count(0) == n_calls


@pytest.mark.slow
def test_openai(openai_client: Any) -> None:
    """`reasoning_content` has what was thought, whole and as a stream, and the usage counts its tokens."""
    asked = {"model": "thinker", "messages": messages("2 + 2?")}
    reply = openai_client.chat.completions.create(**asked)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    assert reply.usage.completion_tokens_details.reasoning_tokens == 6
    found = {"reasoning_content": "", "content": ""}
    for part in openai_client.chat.completions.create(**asked, stream=True):
        for name in found:
            found[name] += getattr(part.choices[0].delta, name, None) or ""
    assert found == {"reasoning_content": "Two and two.", "content": "Four."}


@pytest.mark.slow
def test_a_prompt_that_begins_to_think(openai_client: Any, thinker: Running) -> None:
    """Where the template itself opens the thoughts, the text begins within them."""
    asked = {"model": "thinker", "messages": messages("#"), "max_tokens": 2}
    reply = openai_client.chat.completions.create(**asked)
    assert (reply.choices[0].message.reasoning_content, reply.choices[0].message.content) == ("Yes.", "")
    parts = list(openai_client.chat.completions.create(**asked, stream=True))
    assert "".join(getattr(part.choices[0].delta, "reasoning_content", "") for part in parts) == "Yes."
    assert opened_mark(thinker.engine.requests.render(messages("#")), MARKS["think"]) == "<think>"


@pytest.mark.slow
def test_ollama(ollama_client: Any) -> None:
    """`thinking` has what was thought in chat and generate, whole and as a stream; think=False switches it off."""
    whole = ollama_client.chat("thinker", messages("2 + 2?"))
    assert (whole.message.thinking, whole.message.content) == ("Two and two.", "Four.")
    parts = list(ollama_client.chat("thinker", messages("2 + 2?"), think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Two and two."
    assert "".join(part.message.content for part in parts) == "Four."
    made = ollama_client.generate("thinker", "2 + 2?")
    assert (made.thinking, made.response) == ("Two and two.", "Four.")
    off = ollama_client.chat("thinker", messages("2 + 2?"), think=False)
    assert (off.message.thinking, off.message.content) == (None, "Yes.")
    assert "thinking" in ollama_client.show("thinker").capabilities


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_thinking_is_switched_off(thinker: Running, fields: dict[str, Any]) -> None:
    """By OpenAI's field and by llama-server's, as by Engine.chat."""
    reply = thinker.client.post("/v1/chat/completions", json={"messages": messages("2 + 2?")} | fields)
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert IGNORED_HEADER not in reply.headers
    assert thinker.engine.chat(messages("2 + 2?"), think=False).text == "Yes."
    found = split_reply(thinker.engine.chat(messages("2 + 2?"), think=True).text)
    assert found == Parts("Two and two.", "Four.", [])


def test_a_model_that_does_not_think(server: Running) -> None:
    """A tag in its text is text; think=False changes nothing; think=True and an effort are ignored by name."""
    asked = {"model": "tiny", "messages": messages("x"), "stream": False, "options": {"num_predict": 1}}
    assert server.client.post("/api/chat", json=asked | {"think": False}).status_code == 200
    assert server.client.post("/api/chat", json=asked | {"think": True}).headers[IGNORED_HEADER] == "think"
    with pytest.raises(RequestError, match="never thinks"):
        server.engine.chat(messages("x"), think=True)
    asked = {"messages": messages("x"), "max_tokens": 1, "reasoning_effort": "high"}
    assert server.client.post("/v1/chat/completions", json=asked).headers[IGNORED_HEADER] == "reasoning_effort"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/api/chat", {"think": 3}, "think is 3; it must be true, false"),
        ("/api/chat", {"think": []}, "think is []; it must be true, false"),
        ("/v1/chat/completions", {"reasoning_effort": 3}, "reasoning_effort is 3; it must be a string"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages can't be"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b can't be set"),
        ("/v1/chat/completions", {"chat_template_kwargs": 1}, "chat_template_kwargs is 1; it must be an object"),
    ],
)
def test_what_is_refused(thinker: Running, path: str, fields: dict[str, Any], words: str) -> None:
    """A value that means nothing is a 400 that names the field."""
    reply = thinker.client.post(path, json={"model": "thinker", "messages": messages("x")} | fields)
    assert (reply.status_code, words in reply.text) == (400, True)


def test_earlier_thoughts_are_told_to_the_template(thinker: Running) -> None:
    """`reasoning_content` and `thinking` of a message of the chat are what the template may show."""
    plain = [*messages("x"), {"role": "assistant", "content": "y"}, *messages("x")]
    lengths = []
    for more in ({}, {"reasoning_content": "abc"}, {"thinking": "abc"}):
        asked = {"messages": [plain[0], plain[1] | more, plain[2]], "max_tokens": 1}
        lengths.append(thinker.client.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"])
    assert lengths == [lengths[0], lengths[0] + 5, lengths[0] + 5]


@pytest.mark.parametrize(
    ("begun", "thought", "answer"),
    [
        ({"content": "Abc"}, "", " more"),
        ({"content": [{"type": "text", "text": "Abc"}]}, "", " more"),
        ({"content": "", "reasoning_content": "Abc"}, " more", ""),
        ({"content": "<think>Abc"}, " more", ""),
        ({"content": "Abc", "reasoning_content": "x"}, "", " more"),
    ],
)
def test_an_answer_that_was_begun_is_continued(
    thinker: Running, begun: dict[str, Any], thought: str, answer: str
) -> None:
    """A last message of the assistant is the beginning of the answer, in all interfaces; the reply is the rest."""
    for asked in ("2 + 2", "#"):  # the template opens the thoughts of the second
        chat = [*messages(asked), {"role": "assistant"} | begun]
        reply = thinker.client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 1}).json()
        message = reply["choices"][0]["message"]
        assert (message.get("reasoning_content", "").strip(), message["content"]) == (thought.strip(), answer)
        if isinstance(begun["content"], str):
            body = {"model": "thinker", "messages": chat, "stream": False, "options": {"num_predict": 1}}
            assert thinker.client.post("/api/chat", json=body).json()["message"]["content"] == answer


def test_what_is_no_begun_answer(thinker: Running) -> None:
    """Calls are not continued, and a chat needs a message that is answered."""
    alone = {"messages": [{"role": "assistant", "content": "Abc"}]}
    reply = thinker.client.post("/v1/chat/completions", json=alone)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": "Abc", "tool_calls": [call]}
    reply = thinker.client.post("/v1/chat/completions", json={"messages": [*messages("x"), called], "max_tokens": 9})
    assert reply.json()["choices"][0]["message"]["content"] == " more"  # the template's own rendering ends so
