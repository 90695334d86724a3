"""Why a prompt much like the kept one is read again: what is told, to whom, and when."""

import logging
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama
from support.processes.running_server import messages, started

import edgedec
from edgedec.decoding.prompt_miss import miss_of
from edgedec_apps.cli.shown.explain import explained

TAIL = [int(token_id) for token_id in np.random.default_rng(3).integers(97, 123, 600)]
HEAD = [*b"You write code for me.\ncch="]


def piece(token_id: int) -> bytes:
    return bytes([token_id])


def test_a_miss_says_where_texts_differ_and_what_is_common_behind() -> None:
    """At most 40 characters of each, what can't be printed escaped; of pictures nothing."""
    held, prompt = [*HEAD, *b"fa690", -1, *TAIL], [*HEAD, *b"71fea\xff\x1b", *TAIL[9:]]
    found = miss_of(held, prompt, len(HEAD), piece)
    assert found is not None
    assert found.counts == (
        "the prompt has the first 27 tokens of the kept one; about 544 behind a difference are the same, and read "
        "again, as keys and values depend on the text before"
    )
    first, second = (bytes(tail).decode()[:n] for tail, n in ((TAIL, 23), (TAIL[9:], 21)))
    assert found.places == rf"they differ at 'for me.\ncch=fa690{first}' and at 'for me.\ncch=71fea�\x1b{second}'"


@pytest.mark.parametrize(
    ("held", "prompt", "n_reused"),
    [
        (HEAD, [*HEAD, *TAIL], 27),  # it goes on
        ([*HEAD, 1, *TAIL], [*HEAD, 2, *TAIL], 28),  # the disk had more
        ([*HEAD, 1, *TAIL[:255]], [*HEAD, 2, *TAIL[:255]], 27),
        ([*HEAD, 1, *TAIL], [*HEAD, 2, *TAIL[::-1]], 27),
        ([], TAIL, 0),
    ],
)
def test_what_is_no_miss(held: list[int], prompt: list[int], n_reused: int) -> None:
    """Nothing is told where nothing was lost."""
    assert miss_of(held, prompt, n_reused, piece) is None


@pytest.mark.slow
def test_who_runs_the_model_is_told_and_no_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The texts are in the statistics and in the log of debugging; the log has counts, and an answer nothing of it."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tiny_llama(tmp_path / "m.gguf", n_layer=1, chat_template=template)
    texts = [f"cch={number}; {bytes(TAIL).decode()}" for number in ("fa690", "71fea")]
    with edgedec.load(path, runtime="cpu", n_ctx=1000, draft="off", offline=True) as engine:
        first, second = (engine.generate(text, max_tokens=1).stats for text in texts)
    assert first.miss == ""
    assert second.miss.startswith("the prompt has the first 5 tokens of the kept one; about 544 behind")
    assert "differ at" in second.miss
    assert "differ at" not in repr(second)
    assert second.miss in explained(second, "all")
    assert second.miss in " ".join(" ".join(explained(second, "short")).split())
    caplog.set_level(logging.DEBUG, "edgedec")
    with started(path, load_options={"n_ctx": 1000}) as running:
        for text in texts:
            reply = running.client.post("/v1/chat/completions", json={"messages": messages(text), "max_tokens": 1})
    assert reply.status_code == 200
    assert "differ" not in reply.text
    levels = {record.getMessage()[:4]: record.levelno for record in caplog.records if record.name.endswith("reading")}
    assert levels == {"the ": logging.INFO, "they": logging.DEBUG}
    assert not any("cch=" in record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG)
