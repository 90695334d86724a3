"""Who may write control tokens through the server: a prompt may, a message may not; and a template that is broken."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.running_server import Running, started

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or '' }}</s>{% endfor %}assistant: "
)
BROKEN = "{% for m in messages %}{% trans %}{{ m.content }}{% endtrans %}{% endfor %}"
COUNTS = ("prompt_tokens", "input_tokens", "prompt_eval_count")
TOOL = {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {"?": {"type": "string"}}}}


def messages(*contents: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, *({"role": role, "content": content} for content in contents)]


def said(value: Any, word: str) -> Any:
    """Return a body with a word in place of each "?"."""
    if isinstance(value, str):
        return value.replace("?", word)
    if isinstance(value, dict):
        return {said(key, word): said(each, word) for key, each in value.items()}
    return [said(each, word) for each in value] if isinstance(value, list) else value


CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAI": ("/v1/chat/completions", {"messages": messages("?")}),
    "system": ("/v1/chat/completions", {"messages": [{"role": "system", "content": "?"}, *messages("b")]}),
    "tool": (
        "/v1/chat/completions",
        {"messages": [*messages("b"), {"role": "tool", "tool_call_id": "1", "content": "?"}]},
    ),
    "tools": ("/v1/chat/completions", {"messages": messages(), "tools": [{"type": "function", "function": TOOL}]}),
    "begun": ("/v1/chat/completions", {"messages": messages("?", role="assistant")}),
    "history": ("/v1/chat/completions", {"messages": [*messages("?", role="assistant"), *messages("b")]}),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "text", "text": "?"}]}]},
    ),
    "responses": ("/v1/responses", {"input": "?", "instructions": "?"}),
    "Anthropic": ("/v1/messages", {"messages": messages("?"), "system": "?"}),
    "counted": ("/v1/messages/count_tokens", {"messages": messages("?")}),
    "ollama": ("/api/chat", {"messages": messages("?"), "stream": False}),
    "generate": ("/api/generate", {"prompt": "?", "system": "?", "stream": False}),
}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAI": ("/v1/completions", {"prompt": "a?"}),
    "ollama": ("/api/generate", {"prompt": "a?", "raw": True, "stream": False}),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(
        tiny_llama(tmp_path_factory.mktemp("said") / "m.gguf", chat_template=TEMPLATE, n_ctx_train=4096)
    ) as it:
        yield it


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tiny_llama(tmp_path_factory.mktemp("broken") / "broken.gguf", chat_template=BROKEN, n_ctx_train=4096)
    with started(path) as it:
        yield it


def count(running: Running, path: str, body: dict[str, Any]) -> int:
    """Return the tokens of a prompt, as the interface tells them."""
    limit: dict[str, Any] = (
        {} if path.endswith("count_tokens") else {"max_output_tokens" if "responses" in path else "max_tokens": 1}
    )
    if path.startswith("/api/"):
        limit = {"options": {"num_predict": 1}}
    reply = running.client.post(path, json=body | limit | {"model": "default"})
    assert reply.status_code == 200, reply.text
    document = reply.json()
    found = {**document, **document.get("usage", {})}
    counted = next(found[name] for name in COUNTS if name in found)
    return int(counted) + int(found.get("cache_read_input_tokens", 0))  # Anthropic counts what was kept apart


@pytest.mark.parametrize("name", CHATS)
def test_what_a_chat_says_is_text(running: Running, name: str) -> None:
    """`</s>` takes the tokens of its four characters, as four others do."""
    path, body = CHATS[name]
    plain, spelled = (count(running, path, said(body, word)) for word in ("<xs>", "</s>"))
    assert spelled == plain
    if path.endswith("chat/completions"):
        trusted = said(body, "</s>") | {"chat_template_kwargs": {"trust_messages": True}}
        assert count(running, path, trusted) < plain


@pytest.mark.parametrize("name", PROMPTS)
def test_a_whole_prompt_writes_them(running: Running, name: str) -> None:
    """And a BOS token that it writes itself is not doubled."""
    path, body = PROMPTS[name]
    plain, spelled = (count(running, path, said(body, word)) for word in ("<xs>", "</s>"))
    assert spelled == plain - 3
    begun = {**body, "prompt": "<s>ab"}
    assert count(running, path, begun) == count(running, path, {**body, "prompt": "ab"})


def test_a_template_that_does_not_compile_refuses_chats_alone(broken: Running) -> None:
    for path, body in PROMPTS.values():
        assert count(broken, path, said(body, "b")) > 0
    assert broken.client.get("/v1/models").status_code == 200
    for name in ("OpenAI", "begun", "responses", "Anthropic", "counted", "ollama", "generate"):
        path, body = CHATS[name]
        more = {"max_tokens": 1} if path == "/v1/messages" else {}
        reply = broken.client.post(path, json=said(body, "b") | {"model": "default"} | more)
        assert reply.status_code == 400, (name, reply.text)
        assert "broken.gguf: chat template, line 1: " in reply.text
        assert "(--chat-template)" in reply.text
