"""The field `refine`: an answer is checked by a check that the operator named, and written again."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from support.processes.running_server import PATIENCE_S, Running, messages, started, wait_until

from edgedec_apps.refine import RefineBy, refined

pytestmark = pytest.mark.slow

SHORT = (
    "import json, sys; n = len(json.load(sys.stdin)['steps'][0]); "
    "print([n % 7 / 10]); print(n, 'characters', file=sys.stderr)"
)
NOTES = (
    "import json, os, sys, time; note = open(json.load(sys.stdin)['prefix'], 'w'); "
    "print(os.getpid(), end='.', file=note, flush=True); time.sleep(60)"
)
CHECKS = {
    "short": [sys.executable, "-c", SHORT],
    "hangs": [sys.executable, "-c", "import time; time.sleep(60)"],
    "notes": [sys.executable, "-c", NOTES],
}
ASKED: dict[str, Any] = {"messages": messages("Hi"), "max_tokens": 6, "seed": 3, "temperature": 1.5}
BEGUN = {"role": "assistant", "content": "x"}


@pytest.fixture(scope="module")
def server(chat_path: Path) -> Iterator[Running]:
    with started(chat_path, n_parallel=2, checks=CHECKS) as running:
        yield running


def test_the_answer_is_that_of_the_engine(server: Running) -> None:
    """The answer is the best text, and its reasons say what the check said about each."""
    reply = server.client.post(
        "/v1/chat/completions", json=ASKED | {"refine": {"check": "short", "n": 2, "texts": 4}}
    ).json()
    options = {name: value for name, value in ASKED.items() if name != "messages"}
    own = refined(server.engine, messages("Hi"), RefineBy(check=CHECKS["short"], n=2, texts=4), **options)
    assert reply["choices"][0]["message"]["content"] == own.text
    (generation,) = reply["edgedec"]["generations"]
    assert f"refined: text {own.place + 1} of 4: {own.why}" in generation["reasons"]
    assert generation["explanation"][-4:] == own.lines()


def test_requests_at_once_have_the_answers_that_they_have_alone(server: Running) -> None:
    """Refined chats and others share forwards and two places; the reply is a function of the seed."""
    refine = {"refine": {"check": "short", "n": 2, "texts": 5}}
    bodies = [ASKED | {"seed": 3 + k} | (refine if k % 2 else {}) for k in range(5)]
    ask = partial(server.client.post, "/v1/chat/completions")
    alone = [ask(json=body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(5) as pool:
        assert [reply.json()["choices"] for reply in pool.map(lambda body: ask(json=body), bodies)] == alone


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a process is looked for as Linux shows it")
def test_a_client_that_leaves_ends_the_check(server: Running, tmp_path: Path) -> None:
    """The process of the check ends, and the place is free for the next request."""
    for k in range(3):  # one more than there are places
        note = tmp_path / f"pid{k}"
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
        body = ASKED | {"refine": {"check": "notes"}, "messages": messages(str(note))}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        wait_until(partial(is_whole, note), "the check does not begin")
        connection.close()
        wait_until(partial(is_gone, note.read_text()[:-1]), "the check goes on")
    assert server.client.post("/v1/chat/completions", json=ASKED).status_code == 200


def is_whole(note: Path) -> bool:
    """Return whether a check has written its process id, with a period behind it."""
    return note.exists() and note.read_text().endswith(".")


def is_gone(process: str) -> bool:
    """Return whether a process has ended."""
    return not Path("/proc", process).exists()


def test_seconds_end_a_check_that_hangs(server: Running) -> None:
    """The text that was written is the answer."""
    reply = server.client.post("/v1/chat/completions", json=ASKED | {"refine": {"check": "hangs", "seconds": 0.5}})
    assert reply.status_code == 200
    assert "nothing was checked" in reply.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"refine": {"check": "rm -rf /"}}, "refine.check", "it must be one of short, hangs, notes"),
        ({"refine": {"check": ["sh", "-c", "x"]}}, "refine.check", "a string"),
        ({"refine": {"n": 2}}, "refine.check", "is missing"),
        ({"refine": "short"}, "refine", "an object"),
        ({"refine": {"check": "short", "n": 17}}, "refine.n", "1 to 16"),
        ({"refine": {"check": "short", "seconds": 0}}, "refine.seconds", "above 0"),
        ({"refine": {"check": "short"}, "stream": True}, "refine", "stream"),
        ({"refine": {"check": "short"}, "n": 2}, "refine", "n exclude"),
        ({"refine": {"check": "short"}, "messages": [*messages("Hi"), BEGUN]}, "refine", "assistant"),
    ],
)
def test_what_is_refused(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    """A request names a check, and no command; the error names the field."""
    reply = server.client.post("/v1/chat/completions", json=ASKED | fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
