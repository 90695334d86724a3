"""/extract: the engine's quotations, and refusals that name the field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.running_server import Running, started

from edgedec_apps.extraction import extract

pytestmark = pytest.mark.slow

PASSAGE = "b abc\nab cab"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny model."""
    folder: Path = tmp_path_factory.mktemp("extract")
    with started(tiny_llama(folder / "tiny.gguf", n_ctx_train=512), n_parallel=1) as running:
        yield running


def test_the_quotations_are_the_engines(running: Running) -> None:
    """With all fields, and with those that must be there."""
    asked = {"question": "a?", "passage": PASSAGE}
    for fields, n, most in (({}, 3, 64), ({"n": 5, "max_tokens": 4, "model": "tiny"}, 5, 4)):
        own = extract(running.engine, "a?", PASSAGE, n=n, max_tokens=most)
        reply = running.client.post("/extract", json=asked | fields).json()
        expected = [(span.text, span.start, span.end, span.logprob, span.probability) for span in own.spans]
        assert [tuple(span[key] for key in KEYS) for span in reply["spans"]] == expected
        assert len(expected) == n
        assert reply["usage"]["prompt_tokens"] == own.n_prompt_tokens
        assert reply["searched"]["rows"] == own.n_rows


KEYS = ("text", "start", "end", "logprob", "probability")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"question": ""}, "question"),
        ({"passage": None}, "passage"),
        ({"passage": "x" * 2000}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 101}, "n"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"passage": "abc " * 90, "max_tokens": 512}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(running: Running, change: dict[str, Any], param: str) -> None:
    """Each is a 400."""
    reply = running.client.post("/extract", json={"question": "a?", "passage": PASSAGE} | change)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
