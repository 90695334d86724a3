"""Pictures through the four interfaces: one text, one count; never taken for another picture; refused with a reason."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.seeing_model import base64_of, data_url, picture, seeing_model
from support.processes.running_server import Running, started

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
