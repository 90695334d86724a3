"""Adapters by request: llama-server's `lora`, and the address /lora-adapters."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_adapters import tiny_adapter
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here
from support.processes.running_server import CHAT, Running, messages, room_for, started

import edgedec

pytestmark = pytest.mark.slow
SETS = ((1.0, 0.0), (0.0, 0.5), (0.0, 0.0), (1.0, 0.5))
Plain = dict[tuple[float, ...], str]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture(scope="module")
def adapters(chat_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("lora")
    return [tiny_adapter(folder / f"{name}.gguf", chat_path, seed=seed) for seed, name in enumerate("ab", 1)]


@pytest.fixture(scope="module")
def adapted(chat_path: Path, adapters: list[Path]) -> Iterator[Running]:
    """A server of the tiny model with both adapters, two requests at once; the first one is on."""
    with started(chat_path, n_parallel=2, load_options={"lora": [adapters[0], (adapters[1], 0.0)]}) as running:
        yield running


def body(path: str, scales: tuple[float, ...] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a request for a text with adapters; those at scale 0 are not named."""
    found: dict[str, Any] = {"temperature": 0}
    if "completions" in path:
        found |= {"max_tokens": 12, "ignore_eos": True}
    else:
        found["max_output_tokens"] = 12
    found |= {"prompt": "one, two"} if path == PATHS[0] else {"messages": messages("one, two")}
    if path == PATHS[2]:
        found |= {"input": messages("one, two")}
        del found["messages"]
    if scales is not None:
        found["lora"] = [{"id": number, "scale": scale} for number, scale in enumerate(scales) if scale]
    return found | fields


def text(running: Running, path: str, scales: tuple[float, ...] | None = None) -> str:
    """Return the text of an answer."""
    reply = running.client.post(path, json=body(path, scales))
    assert reply.status_code == 200, reply.text
    if path == PATHS[2]:
        return str(reply.json()["output"][0]["content"][0]["text"])
    choice = reply.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.fixture(scope="module")
def plain(chat_path: Path, adapters: list[Path]) -> Plain:
    """The completion with each set of adapters, of an engine that has loaded these alone."""
    found: Plain = {}
    for scales in SETS:
        lora = [(path, scale) for path, scale in zip(adapters, scales, strict=True) if scale]
        with edgedec.load(chat_path, runtime="cpu", n_ctx=512, draft="off", lora=lora) as engine:
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_end": True}
            found[scales] = engine.generate("one, two", **options).text
    assert len(set(found.values())) == len(SETS)
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_request_has_the_adapters_that_it_names(adapted: Running, plain: Plain, path: str) -> None:
    """Each interface: the same set gives the same text, other sets give other texts, as engines of their own do."""
    found = [text(adapted, path, scales) for scales in (*SETS, *SETS)]
    assert found[: len(SETS)] == found[len(SETS) :]
    assert len(set(found)) == len(SETS)
    assert text(adapted, path) == found[0]  # of the scales that the server was started with
    if path == PATHS[0]:
        assert found[: len(SETS)] == [plain[scales] for scales in SETS]


def test_requests_at_once(adapted: Running, plain: Plain) -> None:
    """Eight requests of four sets on two sessions: each answer is its own set's."""
    begin, jobs = threading.Barrier(2 * len(SETS)), (*SETS, *SETS)

    def ask(scales: tuple[float, ...]) -> str:
        begin.wait(60)
        return text(adapted, PATHS[0], scales)

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(ask, jobs)) == [plain[scales] for scales in jobs]


def test_the_scales_of_requests_that_name_none(adapted: Running, plain: Plain) -> None:
    """GET lists the adapters without their folders; POST sets the scales, and those that it leaves out are 0."""
    listed = [{"id": 0, "path": "a.gguf", "scale": 1.0}, {"id": 1, "path": "b.gguf", "scale": 0.0}]
    assert adapted.client.get("/lora-adapters").json() == listed
    try:
        reply = adapted.client.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}])
        assert [entry["scale"] for entry in reply.json()] == [0.0, 0.5]
        assert text(adapted, PATHS[0]) == plain[0.0, 0.5]
        assert text(adapted, PATHS[0], (1.0, 0.0)) == plain[1.0, 0.0]
        assert adapted.client.post("/lora-adapters", json=[]).json()[1]["scale"] == 0.0
        assert text(adapted, PATHS[0]) == plain[0.0, 0.0]
    finally:
        adapted.client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
    assert adapted.client.get("/lora-adapters?model=tiny").json() == listed


WRONG: tuple[tuple[Any, str], ...] = (
    (5, "must be a list"),
    ({"id": 0}, "must be a list"),
    ([{"id": 0}], "must be a list"),
    ([{"id": 0, "scale": 1, "x": 2}], "must be a list"),
    ([{"id": 0, "scale": "1"}], "must be a list"),
    ([{"id": 0, "scale": True}], "must be a list"),
    ([[]], "must be a list"),
    ([{"id": 2, "scale": 1}], "has the id 2; the model has ids from 0 to 1"),
    ([{"id": -1, "scale": 1}], "has the id -1"),
    ([{"id": True, "scale": 1}], "has the id True"),
    ([{"id": "a.gguf", "scale": 1}], "has the id 'a.gguf'"),
    ([{"id": 0, "scale": None}], "no finite number"),
    ([{"id": 0, "scale": [1]}], "no finite number"),
    ([{"id": 0, "scale": 1e300}], "no finite number"),
)


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_wrong_scales_are_refused(adapted: Running, given: Any, words: str) -> None:
    """A 400 that says what is wrong, in requests and at the address; the scales stay."""
    for path, sent in ((PATHS[0], body(PATHS[0], lora=given)), ("/lora-adapters", given)):
        reply = adapted.client.post(path, json=sent)
        assert reply.status_code == 400, reply.text
        assert words in reply.text.replace('\\"', '"')
    assert [entry["scale"] for entry in adapted.client.get("/lora-adapters").json()] == [1.0, 0.0]


def test_a_model_without_adapters(server: Running) -> None:
    """The list is empty; to name an adapter is an error that says how one is loaded."""
    assert server.client.get("/lora-adapters").json() == []
    reply = server.client.post(PATHS[0], json=body(PATHS[0], (1.0,)))
    assert reply.status_code == 400
    assert "no adapters (edgedec serve --lora FILE loads them)" in reply.text
    assert server.client.post("/lora-adapters", content=b'[], "x": 1').status_code == 400
    assert server.client.post("/lora-adapters", content=b"nonsense").status_code == 400


def test_an_adapter_that_does_not_fit_every_model(
    chat_path: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start refuses by name, also where the second is loaded on demand; a preset has an adapter for one alone."""
    for name in ("EDGEDEC_CACHE", "EDGEDEC_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "first.gguf").symlink_to(chat_path)
    second = tiny_llama(tmp_path / "models" / "second.gguf", n_layer=1, n_ctx_train=2048, chat_template=CHAT)

    words = r"a\.gguf: the pair of 'blk.* is for a tensor that second\.gguf lacks"
    with (
        pytest.raises(AssertionError, match=words),
        started(chat_path, second, load_options={"lora": [adapters[0]]}, adapt=room_for(1)),
    ):
        pass
    assert run_here("create", "tuned", "first", "--lora", str(adapters[0])).code == 0
    with started(Path("tuned"), second, adapt=room_for(1)) as running:
        asked = {"prompt": "one, two", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        found = {}
        for name in ("tuned", "second"):
            reply = running.client.post("/v1/completions", json=asked | {"model": name})
            assert reply.status_code == 200, reply.text
            found[name] = reply.json()["choices"][0]["text"]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_end": True}
    for name, path, lora in (("tuned", chat_path, [adapters[0]]), ("second", second, [])):
        with edgedec.load(path, runtime="cpu", n_ctx=512, draft="off", lora=lora) as engine:
            assert engine.generate("one, two", **options).text == found[name]
