"""Layers on other machines, with a draft model on this one, too: the text is the one without.

A server that is lost costs a clear error and no text.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.command_line import finish, run_process, start
from support.processes.rpc_servers import RpcServer, rpc_servers

import edgedec
from edgedec.api.options import DraftOptions, Lossy
from edgedec.errors import OptionError, RequestError, RuntimeLostError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec_methods.overlapped import THREAD_NAME, OverlappedModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.rpc.addresses import check_addresses, servers_note
from edgedec_runtimes.llamacpp.rpc.patience import Patience
from edgedec_runtimes.llamacpp.rpc.servers import ask_server, rpc_devices
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytestmark = pytest.mark.slow


PROMPT = "def total(items):\n    result = 0\n    for item in items:\n        result += item\n    return result\n\n\n"
OPTIONS: Any = {"runtime": "llamacpp", "n_ctx": 512, "n_threads": 1}
SAMPLED: Any = {"max_tokens": 40, "temperature": 0.9, "seed": 7, "ignore_end": True}


def own(*values: str) -> tuple[str, ...]:
    """Return options of the command line that set options of the llamacpp runtime."""
    return tuple(word for value in values for word in ("--runtime-option", value))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RpcServer]]:
    with rpc_servers(2) as started:
        yield started


def addresses(servers: list[RpcServer]) -> str:
    return ",".join(server.address for server in servers)


def test_the_text_is_the_one_without_rpc(servers: list[RpcServer], smollm_path: Path) -> None:
    """Layers on two servers, drafts verified over the connection: token for token what this machine writes alone.

    Then a server is killed in the middle of a text: the error says which, holds the text so far, and with the server
    started again the text goes on to the same end.
    """
    with edgedec.load(smollm_path, runtime_options={"repack": False}, **OPTIONS) as here:
        sampled = here.generate(PROMPT, **SAMPLED)
        greedy = here.generate(PROMPT, max_tokens=40, temperature=0.0)
    own_repack = {"rpc": addresses(servers), "repack": False}
    with edgedec.load(smollm_path, runtime_options=own_repack, draft="suffix", **OPTIONS) as there:
        assert there.generate(PROMPT, **SAMPLED).token_ids == sampled.token_ids
        drafted = there.generate(PROMPT, max_tokens=40, temperature=0.0)
        assert drafted.token_ids == greedy.token_ids
        assert drafted.stats.n_accepted_tokens > 0
        stream = there.stream(PROMPT, **SAMPLED)
        begun = [output.token_id for output in islice(stream, 10)]
        servers[1].kill()
        with pytest.raises(RuntimeLostError, match=f"{servers[1].address} does not answer any more.*ask again") as lost:
            begun.extend(output.token_id for output in stream)
        assert lost.value.token_ids == tuple(begun) == sampled.token_ids[: len(begun)]
        with pytest.raises(RuntimeUnavailableError, match=f"{servers[1].address} can't be reached"):
            there.generate(PROMPT, **SAMPLED)
        servers[1].start()
        resumed = there.generate(PROMPT, resume=lost.value.token_ids, **SAMPLED)
        assert (resumed.token_ids, resumed.text) == (sampled.token_ids, sampled.text)


def test_a_text_waits_for_its_server(servers: list[RpcServer], smollm_path: Path) -> None:
    """With rpc_wait a text goes on when the server is back, as if nothing had happened; so do texts of one prompt."""
    waiting = {"rpc": addresses(servers), "rpc_wait": 60.0, "repack": False}
    with edgedec.load(smollm_path, runtime_options=waiting, draft="suffix", **OPTIONS) as model:
        undisturbed = model.generate(PROMPT, logprobs=1, **SAMPLED)
        stream = model.stream(PROMPT, logprobs=1, **SAMPLED)
        begun = list(islice(stream, 10))
        servers[0].kill()
        starting = threading.Timer(1.5, servers[0].start)
        starting.start()
        assert (*begun, *stream) == undisturbed.outputs
        starting.join()
        texts = model.samples(PROMPT, 2, **SAMPLED)
        several = model.samples_stream(PROMPT, 2, **SAMPLED)
        list(islice(several, 50))
        servers[1].kill()
        servers[1].start()
        list(several)
        assert [text.token_ids for text in several.generations] == [text.token_ids for text in texts]


def test_a_person_sees_one_sentence(servers: list[RpcServer], smollm_path: Path) -> None:
    """On the command line standard output is that of an undisturbed run; standard error says what happened."""
    layers = own("rpc=" + addresses(servers), "repack=no")
    options = (*layers, "--threads", "1", "-c", "512", "--raw", "-n", "60", "-t", "0")
    command: tuple[Any, ...] = ("run", smollm_path, *options, "--method=ignore-end", "--draft", "off", PROMPT)
    undisturbed = run_process(*command)
    process = start(*command)
    assert process.stdout is not None
    begun = process.stdout.read(20)
    servers[1].kill()
    servers[1].start()
    result = finish(process)
    assert (result.code, begun + result.out) == (0, undisturbed.out)
    assert result.err.count(f"edgedec: the rpc-server {servers[1].address} does not answer any more; waiting") <= 1
    assert result.err.count("waiting up to 120 s until the model can be loaded again, then the text goes on\n") == 1
    process = start(*command, *own("rpc_wait=0.5"))
    assert process.stdout is not None
    begun = process.stdout.read(20)
    servers[1].kill()
    result = finish(process)
    servers[1].start()
    assert result.code == 33
    assert undisturbed.out.startswith(begun + result.out)
    assert "0.5 s were waited in vain; now: " in result.err.splitlines()[-1]


def test_a_silent_server_has_half_a_minute() -> None:
    """The system ends the waiting for an answer, on every connection to another machine."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listening,
        closing(socket.create_connection(listening.getsockname())) as connection,
    ):
        patience = Patience()
        with patience.loading(None):
            pass
        assert _answer_within(connection) == 30
        with patience.forward(1):
            pass
        patience.slowest[1] = 2.0
        with patience.forward(100):
            assert _answer_within(connection) == 800
        with patience.forward(1):
            assert _answer_within(connection) == 30


def _answer_within(connection: socket.socket) -> int:
    """Return the seconds after which the system gives up the waiting for data."""
    seconds, _ = struct.unpack("@ll", connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
    return int(seconds)


def test_servers_are_devices_with_memory(servers: list[RpcServer]) -> None:
    """Each server's device has a name as in llama.cpp, and the memory that the server reports."""
    started = [server.address for server in servers]
    found = rpc_devices(started)
    assert [(one.name, one.backend) for one in found] == [("RPC0", "RPC"), ("RPC1", "RPC")]
    assert all(0 < one.free_bytes <= one.total_bytes for one in found)
    options = LoadOptions(runtime_options={"rpc": addresses(servers)})
    assert LlamaCpp().devices(options)[:2] == found


def test_a_busy_server_is_named(servers: list[RpcServer]) -> None:
    """A server talks to one program at a time: a second one is told so in place of waiting for ever."""
    host, _, port = servers[0].address.partition(":")
    with (
        closing(socket.create_connection((host, int(port)))),
        pytest.raises(RuntimeUnavailableError, match="one program at a time"),
    ):
        ask_server(servers[0].address, patience_s=0.5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_answer_is_refused_or_understood(answers: list[bytes]) -> None:
    """What is no rpc-server, or a broken one, gives one kind of error, and soon."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        thread = threading.Thread(target=_answer, args=(listening, answers))
        thread.start()
        with pytest.raises(RuntimeUnavailableError, match=r"127\.0\.0\.1"):
            ask_server(f"127.0.0.1:{listening.getsockname()[1]}", patience_s=0.1)
        thread.join()


def _answer(listening: socket.socket, answers: list[bytes]) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.settimeout(0.1)
        for data in answers:
            try:
                connection.recv(1000)
                connection.sendall(data)
            except OSError:
                return


@pytest.mark.parametrize("rpc", ["", " , ", "host", "a:1,a:1", 5])
def test_the_option_is_checked_before_a_runtime_is_chosen(rpc: object, smollm_path: Path) -> None:
    """The message is about the addresses, not about runtimes that take none; naming no server is refused."""
    with pytest.raises(OptionError) as refused:
        edgedec.load(smollm_path, runtime_options={"rpc": rpc})
    assert refused.value.argument == "rpc"


@pytest.mark.parametrize("address", ["", "host", ":50052", "host:", "host:0", "host:70000", "host:x"])
def test_addresses_are_checked(address: str) -> None:
    """What is no HOST:PORT is refused before anything is connected."""
    with pytest.raises(OptionError, match="HOST:PORT"):
        check_addresses([address])


def test_addresses_come_once() -> None:
    """The same server twice, or too many of them, is refused."""
    with pytest.raises(OptionError, match="once"):
        check_addresses(["a:1", "a:1"])
    with pytest.raises(OptionError, match="at most 16"):
        check_addresses([f"a:{port}" for port in range(1, 18)])


def test_other_runtimes_refuse_servers(tiny_path: Path) -> None:
    """A runtime that runs on this machine alone says which one does not."""
    with pytest.raises(RequestError, match=r"the cpu runtime has no option 'rpc'"):
        Cpu().plan(tiny_path, LoadOptions(runtime_options={"rpc": "127.0.0.1:1"}))


def test_other_machines_are_warned_of() -> None:
    """Addresses beyond this machine get a sentence on what the protocol lacks; loopback gets none."""
    assert servers_note(("127.0.0.1:50052", "localhost:50053")) == ""
    assert servers_note(("127.0.0.1:1", "10.0.0.5:50052", "pi:50052")).startswith("10.0.0.5:50052 and pi:50052")
    assert "password" in servers_note(("[::1]:1", "10.0.0.5:50052"))


GREEDY: Any = {"max_tokens": 40, "temperature": 0.0, "ignore_end": True}
WAYS: Any = [
    pytest.param({"draft": "model"}, id="model", marks=pytest.mark.long),
    pytest.param({"draft": "model", "drafting": DraftOptions(overlap=True)}, id="overlap"),
    pytest.param({"drafting": DraftOptions(overlap=True)}, id="auto-overlap"),
]


@pytest.fixture(scope="module")
def expected(smollm_path: Path) -> list[tuple[int, ...]]:
    """The greedy text and the one with a seed, of this machine alone."""
    with edgedec.load(smollm_path, draft="off", runtime_options={"repack": False}, **OPTIONS) as here:
        return [here.generate(PROMPT, **request).token_ids for request in (GREEDY, SAMPLED)]


@pytest.mark.parametrize("way", WAYS)
def test_the_text_with_a_draft_model_is_the_one_without(
    servers: list[RpcServer], expected: list[tuple[int, ...]], smollm_path: Path, way: dict[str, Any]
) -> None:
    """Greedy and with a seed, token for token: as plain decoding over RPC, and as this machine writes alone.

    The draft model runs on the cpu runtime here. In the plan the host has the draft model, and the last server the
    layers. Whether `auto` keeps and asks the draft model is a matter of time, and changes nothing in the text.
    """
    ways = way | OPTIONS | {"draft_model": smollm_path, "memory": "1GB"}
    with edgedec.load(smollm_path, runtime_options={"rpc": addresses(servers), "repack": False}, **ways) as there:
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
    drafting = {"draft": "model", "draft_model": smollm_path, "drafting": DraftOptions(overlap=True)}
    ways = drafting | {"n_draft_max": 3} | OPTIONS
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
