"""Whatever JSON a client sends to any address: an answer, or an error with a reason; never an internal error."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import SHOWING, saying_model
from support.processes.running_server import Running, messages, places, started

pytestmark = pytest.mark.slow

TEMPLATE = "{# it may <think> #}" + SHOWING + "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
PRE, SUF, MID = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
SAYS = {"": ["<think>", "so", "</think>", "yes"], MID: ["a"], PRE: [], SUF: [], "no": []}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 3, "stream": False, "logit_bias": {"5": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAMPLING
    | {
        "messages": [
            *messages("x"),
            {"role": "assistant", "content": "y", "reasoning_content": "z", "tool_calls": [CALL]},
            {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
        "response_format": {"type": "text"},
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 3,
        "n": 1,
        "speculative": {"draft": "off"},
    },
    "/v1/completions": SAMPLING | {"prompt": ["x"], "suffix": "y", "max_tokens": 3, "echo": False, "best_of": 1},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "z"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "instructions": "i",
        "tools": [{"type": "function"} | FUNCTION],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 3,
        "stream": False,
        "metadata": {"a": "b"},
        "previous_response_id": None,
        "truncation": "auto",
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "z", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        ],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "max_tokens": 3,
        "stream": False,
    },
    "/infill": {
        "input_prefix": "x",
        "input_suffix": "y",
        "input_extra": [{"filename": "a", "text": "b"}],
        "prompt": "z",
        "n_predict": 3,
        "stream": False,
    },
    "/page/passages": {"messages": messages("x"), "files": [{"name": "a", "text": "y\fz"}], "question": "y"},
    "/extract": {"question": "x?", "passage": "y x", "n": 2, "max_tokens": 3},
    "/v1/rerank": {
        "query": "x",
        "documents": ["y", {"text": "z"}],
        "top_n": 1,
        "return_documents": True,
        "max_tokens_per_doc": 5,
        "normalize": True,
    },
    "/rerank": {"query": "x", "texts": ["y", "z"], "raw_scores": True, "return_text": True, "truncate": True},
    "/tokenize": {"content": "x", "add_special": True, "parse_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/embeddings": {"model": "says#mean", "input": ["x"], "dimensions": 4, "encoding_format": "float"},
    "/api/embed": {"model": "says#mean", "input": ["x"], "truncate": True, "options": {"num_ctx": 64}, "keep_alive": 1},
    "/api/embeddings": {"model": "says#mean", "prompt": "x"},
    "/api/chat": {"model": "says", "messages": messages("x"), "think": True, "stream": False, "options": {"top_k": 3}},
    "/api/generate": {"model": "says", "prompt": "x", "suffix": "y", "think": "low", "stream": False},
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 0.5, "", "x", "\u0000")
VALUES += ([], [[]], [None], {}, {"": {}}, {"type": []})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that can do all of it."""
    path = saying_model(tmp_path_factory.mktemp("fuzz") / "says.gguf", SAYS, chat_template=TEMPLATE)
    with started(path, load_options={"n_ctx": 768}) as running:
        yield running


def mutant(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a body with one or two entries, however deep, replaced, taken away or doubled."""
    changed = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        container, key = rng.choice(places(changed) or [(changed, "x")])
        what = rng.random()
        if what < 0.75:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif what < 0.85 and isinstance(container, dict):
            container[rng.choice(["x", "type", "stream", "model"])] = copy.deepcopy(rng.choice(VALUES))
        elif isinstance(container, dict):
            container.pop(key, None)
        else:
            container.append(copy.deepcopy(container[key]))
    return changed


@pytest.mark.parametrize("path", BODIES)
def test_the_body_itself_is_fine(running: Running, path: str) -> None:
    """What is changed below is a request that is answered."""
    reply = running.client.post(path, json=BODIES[path])
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_an_internal_error(running: Running, path: str, tmp_path: Path) -> None:
    """Each changed body is answered, or refused with a status below 500 and a message; the server goes on."""
    rng = random.Random(path)
    for _ in range(60):
        body = mutant(BODIES[path], rng)
        reply = running.client.post(path, content=json.dumps(body))
        assert reply.status_code < 500, (body, reply.text)
        assert "internal error" not in reply.text, body  # within a stream, too
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert error if isinstance(error, str) else error["message"], body
    assert running.client.post(path, json=BODIES[path]).status_code == 200
