"""An agent's conversation of ten turns is read once: each turn reads what is new, also after a restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_quantized import ARCHITECTURES, write_tiny
from support.processes.running_server import Running, messages, started
from support.texts.agent_turns import N_TURNS, TEMPLATE, request

from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.shared.block_files import BlockFiles, _Job

PAGE = 64
PLAIN, SLIDING = ("llama", 8), [("gemma3", 512), ("gemma3", 1024), ("gemma4", 512)]
RECURRENT = [(name, 8) for name in ("qwen35", "lfm2", "mamba2", "falcon-h1")]
CASES = [(*kind, 8000) for kind in (PLAIN, *SLIDING, *RECURRENT)] + [(*kind, 16000) for kind in (*SLIDING, *RECURRENT)]
SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff": 64, "n_ctx_train": 32768}
TITLE = {"model": "m", "max_tokens": 8, "temperature": 0, "messages": messages("A title, please: " + 300 * "x")}


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each prompt, its tokens, and how many of these the session has all of, its states too.

    Files are written at once: what finds no place among those that wait is another test's.
    """
    found, real = list[tuple[int, int]](), CpuSession.recall

    def recall(session: CpuSession, token_ids: tuple[int, ...], n_held: int) -> int:
        n = real(session, token_ids, n_held)
        with session.using():
            found.append((len(token_ids), native().ec_session_held_before(session.handle, n)))
        return n

    def write(files: BlockFiles, name: str, data: Any, used_s: float) -> None:
        files._write(_Job(files._folder / name, data, used_s))

    monkeypatch.setattr(CpuSession, "recall", recall)
    monkeypatch.setattr(BlockFiles, "write", write)
    return found


@contextmanager
def serving(path: Path, cache: Path | None, n_ctx: int) -> Iterator[Running]:
    """Serve a model that keeps prompts, or none."""
    keeps = None if cache is None else "1GB"
    options = {"n_ctx": n_ctx, "n_threads": 1, "prompt_cache": keeps, "cache_dir": cache or path.parent}
    with started(path, load_options=options | {"offline": True}) as running:
        yield running


def said(running: Running, body: dict[str, Any]) -> str:
    """Return the text of an answer."""
    reply = running.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    return "".join(block["text"] for block in reply.json()["content"])


def converse(path: Path, n_system: int, n_ctx: int, found: list[tuple[int, int]]) -> list[tuple[str, dict[str, Any]]]:
    """Hold the conversation, with a restart in the middle, and return each answer with its request.

    Before every other turn, another short prompt takes the session. Of each turn, the tokens that are read again are
    checked.
    """
    turns, n_before = list[tuple[str, dict[str, Any]]](), 0
    for half in (range(N_TURNS // 2), range(N_TURNS // 2, N_TURNS)):
        with serving(path, path.parent / "cache", n_ctx) as running:
            for number in half:
                if number % 2:
                    said(running, TITLE)
                body = request([answer for answer, _ in turns], n_system)
                turns.append((said(running, body), body))
                n_prompt, n_ready = found[-1]
                is_taken = number % 2 or number == half[0]
                if number == 0:
                    assert n_ready == 0
                elif is_taken:
                    assert n_ready == n_before // PAGE * PAGE
                else:
                    assert n_ready >= n_before - 32  # rows of states that are still in the log
                assert number == 0 or n_prompt - n_ready <= 0.05 * n_prompt
                n_before = n_prompt
    return turns


def written(folder: Path, kind: str, window: int) -> Path:
    """Write a small model of a kind, whose layers with a window see so many tokens."""
    tiny = replace(ARCHITECTURES[kind], sliding_window=window, **SMALL)
    return write_tiny(folder / "m.gguf", tiny, metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "window", "n_tokens"), CASES)
def test_ten_turns(tmp_path: Path, kind: str, window: int, n_tokens: int, ready: list[tuple[int, int]]) -> None:
    """Each answer is that of a server that keeps nothing, and reads all of it."""
    path = written(tmp_path, kind, window)
    for answer, body in converse(path, n_tokens - 2000, n_tokens + 600, ready):
        with serving(path, None, n_tokens + 600) as fresh:
            assert said(fresh, body) == answer
    assert n_tokens <= ready[-1][0] <= n_tokens + 300
