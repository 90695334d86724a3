"""llama-server's field `prompt_progress`: how far a prompt is read, in the parts of a stream."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.running_server import Running, messages, started

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai", reason="openai, of the extra `dev`, is not installed")

PATHS = ("/v1/chat/completions", "/v1/completions")
LONG = "word " * 500


@pytest.fixture(scope="module")
def running(chat_path: Path) -> Iterator[Running]:
    """A server of the tiny model, two requests at once."""
    with started(chat_path, n_parallel=2, load_options={"n_ctx": 4096}) as running:
        yield running


def stream(running: Running, path: str, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the parts of a stream."""
    given = {"messages": messages(prompt)} if "chat" in path else {"prompt": prompt}
    body = given | {"temperature": 0, "max_tokens": 3, "stream": True, "return_progress": True} | fields
    reply = running.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert "return_progress" not in reply.headers.get("x-edgedec-ignored", "")
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize("path", PATHS)
def test_the_reading_is_told_before_the_text(running: Running, path: str) -> None:
    """From what was read before to the last token, in growing steps; the text is that without the field."""
    for n, fields in ((1, {}), (2, {"n": 2, "seed": 3, "temperature": 1})):
        prompt = f"{n} {path} {LONG}"
        parts = stream(running, path, prompt, **fields)
        reports = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
        n_roles = fields.get("n", 1) if "chat" in path else 0
        assert all("prompt_progress" in part for part in parts[n_roles : n_roles + len(reports)])
        assert all(list(report) == ["total", "cache", "processed", "time_ms"] for report in reports)
        n_read = [report["processed"] for report in reports]
        (n_prompt,) = {report["total"] for report in reports}
        ids = running.engine.chat_ids(messages(prompt)) if "chat" in path else running.engine.prompt_ids(prompt)
        assert n_prompt == len(ids)
        assert (n_read[0], n_read[-1] >= n_prompt - 1) == (reports[0]["cache"], True)
        assert n_read == sorted(n_read)
        assert len(set(n_read)) > 2
        again = stream(running, path, prompt, **fields)
        known = [part["prompt_progress"]["cache"] for part in again if "prompt_progress" in part]
        assert set(known) <= {n_prompt - 1}
        assert known or n > 1, "one text evaluates the last token again"
        plain = stream(running, path, prompt, return_progress=False, **fields)
        assert not any("prompt_progress" in part for part in plain)
        assert texts(again) == texts(plain) == texts(parts)


def texts(parts: list[dict[str, Any]]) -> dict[int, str]:
    """Return the texts of a stream by their index."""
    found: dict[int, str] = {}
    for part in parts:
        for choice in part["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def test_a_part_of_llama_servers_form(running: Running) -> None:
    """A chat's part has an empty delta with the role; openai's client takes the stream as any other."""
    role, first = stream(running, PATHS[0], "form")[:2]
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": None}, "logprobs": None, "finish_reason": None}
    ]
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="-")
    asked = {"model": "tiny", "messages": messages("form"), "stream": True, "max_tokens": 3, "temperature": 0}
    with_field = client.chat.completions.create(**asked, extra_body={"return_progress": True})
    without = client.chat.completions.create(**asked)
    shown = ["".join(part.choices[0].delta.content or "" for part in each) for each in (with_field, without)]
    assert shown[0] == shown[1] != ""


def test_an_answer_in_one_piece_has_no_progress(running: Running) -> None:
    """The field has no effect there; one that is no truth value is refused."""
    for path in PATHS:
        given = {"messages": messages("x")} if "chat" in path else {"prompt": "x"}
        reply = running.client.post(path, json=given | {"max_tokens": 2, "return_progress": True})
        assert (reply.status_code, "prompt_progress" in reply.text) == (200, False)
        assert running.client.post(path, json=given | {"return_progress": "yes"}).status_code == 400
