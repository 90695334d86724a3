"""Pictures through four interfaces and their clients: one text, one count, refusals with a reason, no crash."""

import copy
import importlib
import io
import random
import re
import struct
import zlib
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.seeing_model import base64_of, data_url, picture, seeing_model
from support.processes.running_server import Running, places, started

pytestmark = pytest.mark.slow

QUESTION = "What is this?"
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def content(*urls: str, text: str = QUESTION) -> list[dict[str, Any]]:
    """Return OpenAI's content of pictures and a text."""
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def asked(seeing: Running, *urls: str, **options: Any) -> dict[str, Any]:
    """Return the answer of /v1/chat/completions about pictures."""
    body = {"messages": [{"role": "user", "content": content(*urls)}], **OPTIONS, **options}
    answer = seeing.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer of /v1/chat/completions."""
    return str(answer["choices"][0]["message"]["content"])


def test_four_interfaces_one_text(seeing: Running) -> None:
    """A picture and a question have the same text and the same count of tokens everywhere, and as Engine.chat."""
    held = [{"type": "image", "image": picture()}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": held}]
    direct = seeing.engine.chat(messages, temperature=0, max_tokens=6)
    n_prompt = direct.stats.n_prompt_tokens
    assert n_prompt == len(seeing.engine.chat_ids(messages))
    assert min(seeing.engine.chat_ids(messages)) < 0

    answer = asked(seeing, data_url())
    assert (text_of(answer), answer["usage"]["prompt_tokens"]) == (direct.text, n_prompt)

    parts = [{"type": "input_image", "image_url": data_url()}, {"type": "input_text", "text": QUESTION}]
    body: dict[str, Any] = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6}
    response = seeing.client.post("/v1/responses", json=body).json()
    assert response["output"][-1]["content"][0]["text"] == direct.text
    assert response["usage"]["input_tokens"] == n_prompt

    source = {"type": "base64", "media_type": "image/png", "data": base64_of()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": blocks}]}
    message = seeing.client.post("/v1/messages", json=body | OPTIONS).json()
    assert message["content"][0]["text"] == direct.text
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert seeing.client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": n_prompt}

    body = {"model": "seeing", "stream": False, "options": {"temperature": 0, "num_predict": 6}}
    chat = body | {"messages": [{"role": "user", "content": QUESTION, "images": [base64_of()]}]}
    found = seeing.client.post("/api/chat", json=chat).json()
    assert (found["message"]["content"], found["prompt_eval_count"]) == (direct.text, n_prompt)
    generate = body | {"prompt": QUESTION, "images": [base64_of()]}
    assert seeing.client.post("/api/generate", json=generate).json()["response"] == direct.text


def test_two_pictures_of_one_size_are_never_one(seeing: Running) -> None:
    """What is kept of a prompt with a picture is used for this picture alone, in any order and at the same time."""
    colors = ["red", "blue", "red", "green", "blue"]
    cold = {}
    for color in dict.fromkeys(colors):
        seeing.engine.forget()
        cold[color] = text_of(asked(seeing, data_url(color)))
    assert len(set(cold.values())) > 1, "the texts would not show it"
    for reuse in ("exact", "longest"):
        assert [text_of(asked(seeing, data_url(color), reuse=reuse)) for color in colors] == [cold[c] for c in colors]
    first = asked(seeing, data_url("red"), reuse="longest")
    again = asked(seeing, data_url("red"), reuse="longest")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] // 2
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda color: text_of(asked(seeing, data_url(color), n=2)), colors))
    assert found == [cold[color] for color in colors]


def test_a_conversation_about_a_picture(seeing: Running) -> None:
    """Later turns find the picture in what is kept; a response is gone on from; a tool returns a picture."""
    shown = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url()}]}]
    first = seeing.client.post("/v1/responses", json={"input": shown, "max_output_tokens": 4}).json()
    body = {"input": "And now?", "previous_response_id": first["id"], "reuse": "longest", "max_output_tokens": 2}
    second = seeing.client.post("/v1/responses", json=body)
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second.json()["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - 1
    source = {"type": "base64", "media_type": "image/png", "data": base64_of()}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    messages = [{"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]
    answer = seeing.client.post("/v1/messages", json={"messages": messages} | OPTIONS)
    assert answer.status_code == 200, answer.text


def test_it_says_that_it_sees(seeing: Running) -> None:
    """The model's card and ollama's capabilities have "vision"."""
    assert "vision" in seeing.client.get("/v1/models").json()["data"][0]["capabilities"]
    assert "vision" in seeing.client.post("/api/show", json={"model": "seeing"}).json()["capabilities"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (content(*[data_url()] * 9), "has 9 pictures; it may have 8"),
        (content("https://img.test/a.png"), "--image-hosts, which named none"),
        (content("data:image/png;base64,AAAA"), "no picture|not a picture|PNG"),
        (content(data_url()[:-40] + "AAAA"), "picture"),
    ],
)
def test_refusals(seeing: Running, parts: list[dict[str, Any]], words: str) -> None:
    """Too many pictures, addresses, and files that are no picture: a 400 that says why, and the server goes on."""
    body = {"messages": [{"role": "user", "content": parts}]} | OPTIONS
    answer = seeing.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert re.search(words, answer.json()["error"]["message"]), answer.text
    assert seeing.client.get("/health").status_code == 200


def test_a_model_without_eyes(tmp_path: Path) -> None:
    """A picture for a model without a projector is a 400 in the form of each interface, and names the missing file."""
    path = seeing_model(tmp_path)
    (tmp_path / "mmproj-seeing.gguf").unlink()
    with started(path) as blind:
        chat = {"messages": [{"role": "user", "content": content(data_url())}]}
        answer = blind.client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 400
        assert "mmproj*.gguf" in answer.json()["error"]["message"]
        assert "--method pictures:projector" in answer.json()["error"]["message"]
        ollama = {"model": "seeing", "messages": [{"role": "user", "content": "x", "images": [base64_of()]}]}
        answer = blind.client.post("/api/chat", json=ollama)
        assert answer.status_code == 400
        assert "mmproj*.gguf" in answer.json()["error"]
        assert "vision" not in blind.client.post("/api/show", json={"model": "seeing"}).json()["capabilities"]


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


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG whose header says this size, with these bytes in place of its pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def hostile_files() -> list[bytes]:
    """Return files that are no pictures that a model can take."""
    from PIL import Image

    tiff = io.BytesIO()
    Image.new("RGB", (8, 8)).save(tiff, "TIFF")
    good = picture()
    return [
        png(60_000, 60_000),
        png(1, 100_000),
        png(0, 5),
        png(30_000, 2, bytes(10)),
        png(2**31 - 1, 2**31 - 1),
        good[: len(good) // 2],
        good[:24],
        b"GIF89a",
        b"RIFF\xff\xff\xff\xffWEBP",
        b"\xff\xd8\xff\xe0" + bytes(50),
        b"BM" + bytes(60),
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        b"%PDF-1.4",
        tiff.getvalue(),
        b"ftypheic" * 8,
        b"x",
        random.Random(1).randbytes(4000),
    ]


def urls() -> list[Any]:
    """Return what may be given as the address of a picture, and is none."""
    files = [f"data:image/png;base64,{b64encode(data).decode()}" for data in hostile_files()]
    texts = [
        *("file:///etc/passwd", "http://127.0.0.1/", "https://127.0.0.1/", "ftp://x"),
        "https://169.254.169.254/latest",
    ]
    odd = ["data:", "data:,", "data:image/png;base64", f"{data_url()[:-9]}\u0000", "data:image/png;base64,\U0001f600"]
    return [*files, *texts, *odd, 5, True, [], {}, [data_url()], {"url": {}}]


def body_of(interface: str, url: Any) -> dict[str, Any]:
    """Return a request about a picture, in the form of an interface."""
    base64 = url.partition(",")[2] if isinstance(url, str) and url.startswith("data:") else url
    text = {"type": "text", "text": "x"}
    if interface == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]}
    if interface == "/v1/responses":
        return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    if interface == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": base64}
        return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}]}
    return {"model": "seeing", "stream": False, "messages": [{"role": "user", "content": "x", "images": [base64]}]}


SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/api/chat": {"options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", SHORT)
def test_hostile_pictures(seeing: Running, path: str) -> None:
    """Bombs, halves, other formats, other schemes and other types: refused with a sentence in the interface's form."""
    for url in urls():
        answer = seeing.client.post(path, json=body_of(path, url) | SHORT[path])
        assert 400 <= answer.status_code < 500, (url if not isinstance(url, str) else url[:200], answer.text)
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert len(message) > 20, answer.text
        assert "Traceback" not in message
    good = seeing.client.post(path, json=body_of(path, data_url()) | SHORT[path])
    assert good.status_code == 200, good.text


@pytest.mark.parametrize("path", SHORT)
def test_wrong_values_around_a_picture(seeing: Running, path: str) -> None:
    """Whatever stands in place of a picture, of its part or of what is around: an answer, or a 4xx with its reason."""
    body = body_of(path, data_url()) | SHORT[path] | {"model": "seeing"}
    name = "input" if "input" in body else "messages"
    values: tuple[Any, ...] = (None, 5, "x", [], [None], {}, {"type": []})
    for place in range(len(places(body[name]))):
        for value in values:
            changed = copy.deepcopy(body)
            container, key = places(changed[name])[place]
            container[key] = copy.deepcopy(value)
            answer = seeing.client.post(path, json=changed)
            assert answer.status_code < 500, (changed[name], answer.text)
            assert answer.status_code == 200 or len(answer.text) > 30, answer.text
