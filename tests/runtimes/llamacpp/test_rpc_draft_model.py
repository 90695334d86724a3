"""A draft model on this machine, its target's layers on others: the same text, also after a server was lost."""

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.processes.rpc_servers import RpcServer, rpc_servers

import edgedec
from edgedec.api.options import DraftOptions, Lossy
from edgedec.errors import RequestError, RuntimeLostError, RuntimeUnavailableError
from edgedec_methods.overlapped import THREAD_NAME, OverlappedModel

pytestmark = pytest.mark.slow

PROMPT = "def total(items):\n    result = 0\n    for item in items:\n        result += item\n    return result\n\n\n"
OPTIONS: Any = {"runtime": "llamacpp", "n_ctx": 512, "n_threads": 1}
GREEDY: Any = {"max_tokens": 40, "temperature": 0.0, "ignore_end": True}
SAMPLED: Any = {"max_tokens": 40, "temperature": 0.9, "seed": 7, "ignore_end": True}
WAYS: Any = [
    pytest.param({"draft": "model"}, id="model", marks=pytest.mark.long),
    pytest.param({"draft": "model", "drafting": DraftOptions(overlap=True)}, id="overlap"),
    pytest.param({"drafting": DraftOptions(overlap=True)}, id="auto-overlap"),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RpcServer]]:
    """Two servers on this machine."""
    with rpc_servers(2) as started:
        yield started


@pytest.fixture(scope="module")
def expected(smollm_path: Path) -> list[tuple[int, ...]]:
    """The greedy text and the one with a seed, of this machine alone."""
    with edgedec.load(smollm_path, draft="off", runtime_options={"repack": False}, **OPTIONS) as here:
        return [here.generate(PROMPT, **request).token_ids for request in (GREEDY, SAMPLED)]


def addresses(servers: list[RpcServer]) -> str:
    """Return what `rpc` takes."""
    return ",".join(server.address for server in servers)


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_one_without(
    servers: list[RpcServer], expected: list[tuple[int, ...]], smollm_path: Path, way: dict[str, Any]
) -> None:
    """Greedy and with a seed, token for token: as plain decoding over RPC, and as this machine writes alone.

    The draft model runs on the cpu runtime here. In the plan the host has the draft model, and the last server the
    layers. Whether `auto` keeps and asks the draft model is a matter of time, and changes nothing in the text.
    """
    ways = way | OPTIONS
    with edgedec.load(
        smollm_path,
        runtime_options={"rpc": addresses(servers), "repack": False},
        draft_model=smollm_path,
        memory="1GB",
        **ways,
    ) as there:
        plain = [there.generate(PROMPT, draft=False, **request).token_ids for request in (GREEDY, SAMPLED)]
        drafted = [there.generate(PROMPT, **request) for request in (GREEDY, SAMPLED)]
        drafting = there.pool.slots[0].drafting
        terms = there.plan.terms
    assert plain == [found.token_ids for found in drafted] == expected
    assert drafting is not None
    if "draft" not in way:
        return
    source: Any = drafting.factories["model"]
    assert source.model.card.runtime == "cpu"
    assert isinstance(source, OverlappedModel) == ("drafting" in way)
    assert {term.device for term in terms if term.name.startswith("draft model: ")} == {"host"}
    assert {term.device for term in terms if term.name == "KV cache"} == {"RPC1"}
    assert all(found.stats.n_accepted_tokens > 0 for found in drafted)


def test_a_server_is_lost_while_the_draft_model_goes_on(
    servers: list[RpcServer], expected: list[tuple[int, ...]], smollm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the server and has the text so far; nobody drafts on, and the text goes on to the same end."""
    start, n_started = OverlappedModel.start, 0

    def start_and_lose(self: OverlappedModel, user: object, step: Callable[[], bool]) -> None:
        nonlocal n_started
        start(self, user, step)
        n_started += 1
        if n_started == 3:
            servers[1].kill()

    monkeypatch.setattr(OverlappedModel, "start", start_and_lose)
    ways = {
        "draft": "model",
        "draft_model": smollm_path,
        "drafting": DraftOptions(overlap=True),
        "n_draft_max": 3,
    } | OPTIONS
    with edgedec.load(smollm_path, runtime_options={"rpc": addresses(servers), "repack": False}, **ways) as there:
        stream, begun = there.stream(PROMPT, **SAMPLED), list[int]()
        with pytest.raises(RuntimeLostError, match=f"{servers[1].address} does not answer any more") as lost:
            begun.extend(output.token_id for output in stream)
        assert n_started == 3
        assert lost.value.token_ids == tuple(begun) == expected[1][: len(begun)]
        assert 0 < len(begun) < 40
        assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
        with pytest.raises(RuntimeUnavailableError, match=f"{servers[1].address} can't be reached"):
            there.generate(PROMPT, **SAMPLED)
        servers[1].start()
        resumed = there.generate(PROMPT, resume=lost.value.token_ids, **SAMPLED)
        assert resumed.token_ids == expected[1]
        assert there.generate(PROMPT, **GREEDY).token_ids == expected[0]
        stream = there.stream(PROMPT, **GREEDY)
        assert [output.token_id for output in islice(stream, 10)] == [*expected[0][:10]]
        stream.close()
        assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.mark.parametrize(
    ("refused", "keyword"),
    [({"lossy": Lossy(layer_skip=1.05)}, "layer_skip"), ({"draft_head": "some.head"}, "draft_head")],
)
def test_what_needs_the_layers_here_is_refused_at_once(
    smollm_path: Path, refused: dict[str, Any], keyword: str
) -> None:
    """Before anything is looked for or loaded, and with what can be done instead."""
    with pytest.raises(RequestError, match=f"{keyword}.*other machines.*rpc"):
        edgedec.load(smollm_path, runtime_options={"rpc": "127.0.0.1:1"}, **refused)
