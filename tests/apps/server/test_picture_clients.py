"""Real clients send a picture: those of OpenAI (both interfaces), Anthropic, ollama and LangChain; all get one text."""

import importlib
from typing import Any

import pytest
from support.models.seeing_model import base64_of, data_url, picture
from support.processes.running_server import Running

pytestmark = pytest.mark.slow

QUESTION = "What is this?"


@pytest.fixture(scope="module")
def expected(seeing: Running) -> str:
    """The text that Engine.chat writes about the picture."""
    parts = [{"type": "image", "image": picture()}, {"type": "text", "text": QUESTION}]
    return seeing.engine.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=6).text


def client_of(module: str, name: str, **options: Any) -> Any:
    """Return a client, or skip where its package is not installed."""
    return getattr(pytest.importorskip(module), name)(**options)


def test_openais_chat(seeing: Running, expected: str) -> None:
    """With image_url as an object, in one piece and as a stream."""
    parts = [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": QUESTION}]
    asked: dict[str, Any] = {"model": "seeing", "messages": [{"role": "user", "content": parts}], "temperature": 0}
    with client_of("openai", "OpenAI", base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked, max_tokens=6)
        assert answer.choices[0].message.content == expected
        stream = client.chat.completions.create(**asked, max_tokens=6, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == expected


def test_openais_responses(seeing: Running, expected: str) -> None:
    """With input_image."""
    shown = {"type": "input_image", "image_url": data_url(), "detail": "auto"}
    parts = [shown, {"type": "input_text", "text": QUESTION}]
    with client_of("openai", "OpenAI", base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(
            model="seeing", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=6
        )
    assert answer.output_text == expected


def test_anthropics(seeing: Running, expected: str) -> None:
    """With a block of base64; the tokens are counted, too."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of()}}
    asked: Any = [{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}]
    with client_of("anthropic", "Anthropic", base_url=seeing.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(model="seeing", messages=asked, max_tokens=6, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(model="seeing", messages=asked)
    assert answer.content[0].text == expected
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_ollamas(seeing: Running, expected: str) -> None:
    """With bytes, which its client sends as base64, in a chat and with a prompt; show() lists the capability."""
    client = client_of("ollama", "Client", host=seeing.url)
    options = {"temperature": 0, "num_predict": 6}
    message = {"role": "user", "content": QUESTION, "images": [picture()]}
    assert client.chat("seeing", messages=[message], options=options).message.content == expected
    assert client.generate("seeing", QUESTION, images=[picture()], options=options).response == expected
    assert "vision" in client.show("seeing").capabilities


def test_langchains(seeing: Running, expected: str) -> None:
    """With its own form of a picture, which it turns into OpenAI's."""
    pytest.importorskip("langchain_openai")
    messages = importlib.import_module("langchain_core.messages")
    options: dict[str, Any] = {"api_key": "none", "model": "seeing", "temperature": 0, "max_tokens": 6}
    chat = client_of("langchain_openai", "ChatOpenAI", base_url=f"{seeing.url}/v1", max_retries=0, **options)
    held = {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": base64_of()}
    found = chat.invoke([messages.HumanMessage(content=[held, {"type": "text", "text": QUESTION}])])
    assert found.content == expected
