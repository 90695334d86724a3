"""Several models on one server: loaded on demand, unloaded for others, and never under a request."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_models import tiny_llama
from support.processes.running_server import CHAT, ENDLESS, PATIENCE_S, Running, messages, room_for, started, wait_until

import edgedec
from edgedec.errors import CancelledError, MemoryCapError
from edgedec.progress import CancelToken
from edgedec_apps.server.registry.models import CrowdedError, Loaded, Prepare, Prepared, Recipe

pytestmark = pytest.mark.slow

NAMES = ("ape", "bee", "cow")
SHORT = {"max_tokens": 6, "temperature": 0, "ignore_end": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with three tiny models of different weights, which the tests of this file use."""
    root = tmp_path_factory.mktemp("cache")
    (root / "models").mkdir()
    for seed, name in enumerate(NAMES):
        path = root / "models" / f"{name}.gguf"
        tiny_llama(path, seed=seed, n_layer=1, n_ctx_train=4096, chat_template=CHAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEDEC_CACHE", str(root))
        patch.setenv("EDGEDEC_CONFIG", str(root))
        patch.delenv("EDGEDEC_MODELS", raising=False)
        yield root


@pytest.fixture(scope="module")
def texts(cache: Path) -> dict[str, str]:
    """What each model answers to "Hello" alone."""
    found = {}
    for name in NAMES:
        with edgedec.load(cache / "models" / f"{name}.gguf", runtime="cpu", n_ctx=512, draft="off") as engine:
            found[name] = engine.chat(messages("Hello"), **SHORT).text  # type: ignore[arg-type]
    assert len(set(found.values())) == len(NAMES)
    return found


def ask(running: Running, name: str, **fields: Any) -> str:
    """Return a model's answer to "Hello"."""
    asked = {"model": name, "messages": messages("Hello")} | SHORT | fields
    reply = running.client.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


@contextmanager
def endless(running: Running, name: str) -> Iterator[None]:
    """Let a model write during the block."""
    with running.client.stream("POST", "/v1/chat/completions", json=ENDLESS | {"model": name}) as stream:
        lines = stream.iter_lines()  # dropping these closes the stream
        next(lines)
        yield


def test_a_model_is_loaded_when_it_is_asked_for(cache: Path, texts: dict[str, str]) -> None:
    """A server without models lists those of the cache, answers with the one that is named, and guesses none."""
    openai = pytest.importorskip("openai")
    with started() as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        assert running.client.get("/health").json() == {"status": "ok", "model": None}
        assert {model.id: model.ready for model in client.models.list()} == dict.fromkeys(NAMES, False)
        assert client.models.retrieve("bee").meta["n_ctx_train"] == 4096
        reply = client.chat.completions.create(
            model="bee", messages=messages("Hello"), max_tokens=6, temperature=0, extra_body={"ignore_end": True}
        )
        assert (reply.model, reply.choices[0].message.content) == ("bee", texts["bee"])
        assert {model.id: model.ready for model in client.models.list()} == dict.fromkeys(NAMES, False) | {"bee": True}
        for name, status, words in (("dog", 404, "there is no model 'dog' here"), ("", 400, "model is missing")):
            with pytest.raises(openai.APIStatusError, match=words) as refused:
                client.chat.completions.create(model=name, messages=messages("x"))
            assert refused.value.status_code == status
        path = str(cache / "models" / "ape.gguf")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=path, messages=messages("x"))
        assert running.loaded == ["bee"]


def test_the_least_recently_used_is_unloaded(cache: Path, texts: dict[str, str]) -> None:
    """Where two fit, the third takes the place of the one that was not used for longest; each answers as if alone."""
    with started(adapt=room_for(2)) as running:
        for name, loaded in (
            ("ape", ["ape"]),
            ("bee", ["ape", "bee"]),
            ("ape", ["bee", "ape"]),
            ("cow", ["ape", "cow"]),
            ("bee", ["cow", "bee"]),
        ):
            assert ask(running, name) == texts[name]
            assert running.loaded == loaded


def test_the_models_of_the_command_line_are_there_first(cache: Path) -> None:
    """Those that fit together are loaded at the start; requests that name none go to the first."""
    paths = [cache / "models" / f"{name}.gguf" for name in NAMES]
    with started(*paths, adapt=room_for(2)) as running:
        assert running.loaded == ["ape", "bee"]
        ids = [card["id"] for card in running.client.get("/v1/models").json()["data"]]
        assert ids == list(NAMES)
        reply = running.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert reply.json()["model"] == "ape"


def test_a_model_that_writes_is_not_unloaded(cache: Path, texts: dict[str, str]) -> None:
    """A request for another model waits until the text has ended, and requests that come later wait behind it."""
    with started(adapt=room_for(1), load_options={"n_ctx": 100_000}) as running, ThreadPoolExecutor() as pool:
        ape = running.service.registry.entry(running.service.names.find("ape").recipe)
        with endless(running, "ape"):
            others = [pool.submit(ask, running, name) for name in ("bee", "ape")]
            wait_until(lambda: ape.leaving, "nobody waits for its memory")
            assert running.loaded == ["ape"]
            assert not any(other.done() for other in others)
        assert [other.result(PATIENCE_S) for other in others] == [texts["bee"], texts["ape"]]


class Crowded:
    """Makes a server believe that bee can't be planned beside other models: only at rest, or not even then.

    Attributes:
        running: The server.
        error: What planning at rest raises; None where it plans.
    """

    def __init__(self, error: MemoryCapError | None = None) -> None:
        self.running: list[Running] = []
        self.error = error

    def adapt(self, prepare: Prepare) -> Prepare:
        """Return the adapted Prepare."""

        def at_rest(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            entries = self.running[0].service.registry.loaded
            assert not [entry for entry in entries if entry.n_references or not entry.leaving]
            if self.error is not None:
                raise self.error
            return prepare(recipe, n_ctx, cancel)

        def adapted(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            if Path(recipe.model).stem == "bee" and self.running[0].loaded:
                raise CrowdedError("no memory to plan with", at_rest)
            return prepare(recipe, n_ctx, cancel)

        return adapted


@pytest.mark.parametrize(
    ("error", "status", "loaded"),
    [
        (None, 200, ["ape", "bee"]),
        (CrowdedError("not even so", lambda *_: pytest.fail("it is asked again")), 200, ["bee"]),
        (MemoryCapError("it never fits"), 503, ["ape"]),
    ],
    ids=["planned at rest", "planned after an unload", "never fits"],
)
def test_a_model_that_can_not_be_planned_beside_others(
    cache: Path, texts: dict[str, str], error: MemoryCapError | None, status: int, loaded: list[str]
) -> None:
    """It is planned once their requests have ended; they are unloaded only where that is not enough."""
    crowded = Crowded(error)
    with started(adapt=crowded.adapt, load_options={"n_ctx": 100_000}) as running, ThreadPoolExecutor() as pool:
        crowded.running.append(running)
        asked = {"model": "bee", "messages": messages("Hello")} | SHORT
        with endless(running, "ape"):
            waiting = pool.submit(running.client.post, "/v1/chat/completions", json=asked)
            wait_until(lambda: running.service.registry.loaded[0].leaving, "nobody waits for its end")
            assert not waiting.done()
        reply = waiting.result(PATIENCE_S)
        assert (reply.status_code, running.loaded) == (status, loaded)
        assert ask(running, "ape") == texts["ape"]


def test_one_who_gives_up_waiting_leaves_the_model_as_it_was(cache: Path) -> None:
    """Where the client that waits for another model goes away, requests for the model that runs wait no more."""
    with started(adapt=room_for(1), load_options={"n_ctx": 100_000}, n_parallel=2) as running:
        ape = running.service.registry.entry(running.service.names.find("ape").recipe)
        with endless(running, "ape"):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{running.url}/v1/chat/completions",
                    json={"model": "bee", "messages": messages("x")},
                    timeout=httpx.Timeout(PATIENCE_S, read=0.5),
                )
            wait_until(lambda: not ape.leaving, "it still leaves")
            ask(running, "ape")
        assert running.loaded == ["ape"]


def test_twenty_requests_over_three_models(cache: Path, texts: dict[str, str]) -> None:
    """However requests come, each has its model's text, there are never more models than fit, or one being freed."""
    most, at_ends = 0, list[bool]()

    def counting(prepare: Prepare) -> Prepare:
        limited = room_for(2)(prepare)

        def counted(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            prepared = limited(recipe, n_ctx, cancel)

            def opened() -> Loaded:
                nonlocal most
                most = max(most, 1 + len(services[0].loaded))
                loaded = prepared.open()

                def close() -> None:
                    at_ends.append(recipe in [entry.recipe for entry in services[0].service.registry.loaded])
                    loaded.close()

                return replace(loaded, close=close)

            return replace(prepared, open=opened)

        return counted

    services: list[Running] = []
    with started(adapt=counting, n_parallel=2) as running, ThreadPoolExecutor(20) as pool:
        services.append(running)
        asked = [NAMES[i * 7 % 3] for i in range(20)]
        answers = list(pool.map(lambda name: ask(running, name), asked))
        assert not any(at_ends)
    assert answers == [texts[name] for name in asked]
    assert most == 2


def test_a_model_that_can_not_be_loaded(cache: Path, texts: dict[str, str]) -> None:
    """A damaged file answers its own request with what is wrong; the models that are loaded stay."""
    broken = cache / "models" / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"x" * 100)
    try:
        with started(adapt=room_for(1)) as running:
            assert ask(running, "ape") == texts["ape"]
            for path in ("/v1/chat/completions", "/api/chat"):
                reply = running.client.post(path, json={"model": "broken", "messages": messages("x")})
                assert reply.status_code == 404
                assert "broken.gguf" in reply.text
            assert running.loaded == ["ape"]
            assert "broken" in [card["id"] for card in running.client.get("/v1/models").json()["data"]]
            assert ask(running, "ape") == texts["ape"]
    finally:
        broken.unlink()


def test_memory_that_others_took(cache: Path, texts: dict[str, str]) -> None:
    """Where the system has less memory than planned, others are unloaded; where that does not help, it is a 503."""
    short = {"bee"}

    def adapt(prepare: Prepare) -> Prepare:
        def prepared_for(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            prepared, name = prepare(recipe, n_ctx, cancel), Path(recipe.model).stem

            def opened() -> Loaded:
                if name in short and (services[0].loaded or name == "cow"):
                    raise MemoryCapError("the system has no memory left")
                return prepared.open()

            return replace(prepared, open=opened)

        return prepared_for

    services: list[Running] = []
    with started(adapt=adapt) as running:
        services.append(running)
        ask(running, "ape")
        assert ask(running, "bee") == texts["bee"]
        assert running.loaded == ["bee"]
        short.add("cow")
        reply = running.client.post("/v1/chat/completions", json={"model": "cow", "messages": messages("x")})
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the system has no memory left")
        assert ask(running, "ape") == texts["ape"]


def test_the_kv_cache_outlives_its_model(cache: Path) -> None:
    """Where prompts are kept, a model that comes back goes on from what it had read, with the same text."""
    with started(adapt=room_for(1), load_options={"prompt_cache": "1GB"}) as running:

        def timed(name: str) -> tuple[str, int]:
            asked = {"model": name, "messages": messages("Hello " * 50)} | SHORT
            reply = running.client.post("/v1/chat/completions", json=asked).json()
            return reply["choices"][0]["message"]["content"], reply["timings"]["cache_n"]

        text, n_cached = timed("ape")
        assert (timed("bee")[1], n_cached) == (0, 0)
        assert timed("ape") == (text, 320)


class Held:
    """A load that waits for a sign, or for its cancel."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun, self.go = threading.Event(), threading.Event()
        self.n_cancelled = 0

    def adapt(self, prepare: Prepare) -> Prepare:
        """Return a Prepare whose model of this name is held in the middle of its load."""

        def held(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            prepared = prepare(recipe, n_ctx, cancel)

            def opened() -> Loaded:
                self.begun.set()
                while not self.go.is_set():
                    if cancel.cancelled:
                        self.n_cancelled += 1
                        raise CancelledError("loading: cancelled")
                    time.sleep(0.01)
                return prepared.open()

            return replace(prepared, open=opened) if Path(recipe.model).stem == self.name else prepared

        return held


def test_a_client_that_leaves_while_its_model_loads(cache: Path, texts: dict[str, str]) -> None:
    """The load ends, nothing is half loaded, other models answer, and the next request loads the model."""
    held = Held("bee")
    with started(adapt=held.adapt) as running:
        ask(running, "ape")
        with running.posting(b'{"model": "bee", "messages": [{"role": "user", "content": "x"}]}'):
            assert held.begun.wait(PATIENCE_S)
            assert ask(running, "ape") == texts["ape"]  # a model that is there does not wait for one that loads
        wait_until(lambda: held.n_cancelled == 1, "the load goes on")
        assert running.loaded == ["ape"]
        held.go.set()
        assert ask(running, "bee") == texts["bee"]


def test_a_server_that_ends_while_a_model_loads(cache: Path) -> None:
    """Ctrl-C ends the load and the requests that wait for it: they are told so."""
    held, answers = Held("bee"), list[httpx.Response]()
    with started(adapt=held.adapt) as running:

        def wait_for_it() -> None:
            asked = {"model": "bee", "messages": messages("x")}
            answers.append(httpx.post(f"{running.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S))

        waiting = [threading.Thread(target=wait_for_it) for _ in range(2)]
        for thread in waiting:
            thread.start()
        assert held.begun.wait(PATIENCE_S)
        entry = running.service.registry.entry(running.service.names.find("bee").recipe)
        wait_until(lambda: entry.queue.n_waiting == 2, "they do not wait")
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert {answer.json()["error"]["code"] for answer in answers} == {"shutting_down"}
    assert held.n_cancelled == 1


def generate(running: Running, name: str, **fields: Any) -> dict[str, Any]:
    """Return the answer of /api/generate in one piece."""
    options = {"num_predict": 3, "temperature": 0} | fields.pop("options", {})
    asked = {"model": name, "prompt": "Hello", "stream": False, "options": options} | fields
    reply = running.client.post("/api/generate", json=asked)
    document: dict[str, Any] = reply.json() | {"status": reply.status_code}
    return document


def test_how_long_a_model_stays(cache: Path) -> None:
    """keep_alive is what ollama's clients mean by it; without it a model stays as long as the server says."""
    with started(cache / "models" / "ape.gguf", keep_s=0.2) as running:
        assert generate(running, "bee", keep_alive="10m")["load_duration"] > 0
        assert generate(running, "bee", keep_alive="10m")["load_duration"] == 0
        assert running.loaded == ["ape", "bee"]
        assert generate(running, "bee")["status"] == 200
        wait_until(lambda: running.loaded == ["ape"], "it stays")
        generate(running, "cow", keep_alive=0)
        wait_until(lambda: running.loaded == ["ape"], "it stays")
        for ever in (-1, 10**12, "99999999h"):
            generate(running, "cow", keep_alive=ever)
            rows = running.client.get("/api/ps").json()["models"]
            assert [(row["name"], row["expires_at"][:4]) for row in rows] == [("cow", "9999"), ("ape", "9999")]
        assert all(row["size"] > 0 for row in rows)
        assert generate(running, "cow", prompt="", keep_alive=0)["done_reason"] == "unload"
        assert running.loaded == ["ape"]
        assert generate(running, "cow", prompt="", keep_alive=0)["done_reason"] == "unload"
        assert generate(running, "cow", prompt="", keep_alive="1h")["done_reason"] == "load"
        assert running.loaded == ["ape", "cow"]
        refused = generate(running, "cow", keep_alive="soon")
        assert (refused["status"], "keep_alive is 'soon'" in refused["error"]) == (400, True)


def test_a_model_that_writes_is_unloaded_after_its_text(cache: Path) -> None:
    """Who unloads or deletes a model waits until its texts have ended."""
    spare = cache / "models" / "spare.gguf"
    tiny_llama(spare, seed=9, n_layer=1, n_ctx_train=4096, chat_template=CHAT)
    with started(load_options={"n_ctx": 100_000}) as running, ThreadPoolExecutor() as pool:
        for name, end in (
            ("ape", lambda: generate(running, "ape", prompt="", keep_alive=0)["done_reason"]),
            ("spare", lambda: running.client.request("DELETE", "/api/delete", json={"model": "spare"}).status_code),
        ):
            with endless(running, name):
                ended = pool.submit(end)
                wait_until(lambda: running.service.registry.loaded[-1].leaving, "nobody waits for its end")
                assert (ended.done(), spare.exists()) == (False, True)
            assert ended.result(PATIENCE_S) in ("unload", 200)
            assert running.loaded == []
        assert not spare.exists()


def test_a_larger_context_is_loaded(cache: Path) -> None:
    """A larger num_ctx loads the model again with it; a smaller one takes what is there; the text is the same."""
    with started() as running:
        first = generate(running, "ape")
        larger = generate(running, "ape", options={"num_ctx": 1024})
        assert larger["load_duration"] > 0
        assert running.engine_of("ape").n_ctx == 1024
        smaller = generate(running, "ape", options={"num_ctx": 256})
        assert (smaller["load_duration"], running.engine_of("ape").n_ctx) == (0, 1024)
        assert first["response"] == larger["response"] == smaller["response"]
        refused = generate(running, "ape", options={"num_ctx": 5000})
        assert (refused["status"], refused["error"]) == (
            400,
            "options.num_ctx is 5000; the largest that fits is 4096: the model was trained for 4096",
        )
        assert running.loaded == ["ape"]


def test_the_largest_context_that_fits_is_named(cache: Path) -> None:
    """Where the memory ends before the training does, the refusal has the largest context that can be asked for."""

    def adapt(prepare: Prepare) -> Prepare:
        def within(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            if (n_ctx or 0) > 1500:
                raise MemoryCapError("it does not fit")
            return prepare(recipe, n_ctx, cancel)

        return within

    with started(adapt=adapt) as running:
        refused = generate(running, "ape", options={"num_ctx": 4096})
        assert refused["status"] == 400
        assert "options.num_ctx is 4096; the largest that fits is 1472: more does not fit" in refused["error"]
        assert running.loaded == []
        assert generate(running, "ape", options={"num_ctx": 1472})["status"] == 200
        assert running.engine_of("ape").n_ctx == 1472
