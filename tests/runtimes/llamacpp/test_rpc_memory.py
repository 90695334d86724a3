"""Under a cap, this machine's two processes together hold what is planned, and no more than is allowed."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import Result, finish, run_process, start
from support.processes.rpc_servers import rpc_servers

MB = 1_000_000
REFUSED = 50
RIVER = "river " * 256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory"),
]


def own(*values: str) -> tuple[str, ...]:
    """Return options of the command line that set options of the llamacpp runtime."""
    return tuple(word for value in values for word in ("--runtime-option", value))


@pytest.fixture(scope="module")
def addresses() -> Iterator[str]:
    with rpc_servers(2) as started:
        yield ",".join(server.address for server in started)


def options(addresses: str, *given: Any) -> tuple[Any, ...]:
    """Return the options of a command that puts layers on the servers."""
    return ("--runtime", "llamacpp", *own("rpc=" + addresses, "repack=no"), "-c", "512", "--offline", *given)


def resident_bytes(pid: int) -> int:
    """Return what a process and its children hold now; those that have ended hold nothing."""
    pids, n_bytes = [pid], 0
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, path.read_text(encoding="ascii").split())
    for each in pids:
        with suppress(OSError):
            text = Path(f"/proc/{each}/status").read_text(encoding="ascii", errors="replace")
            n_bytes += sum(1024 * int(n_kb) for n_kb in re.findall(r"^VmRSS:\s+(\d+) kB$", text, re.MULTILINE))
    return n_bytes


@contextmanager
def watching(pid: int) -> Iterator[list[int]]:
    """Look again and again in a thread, 500 times a second, while the block runs; the one number is the most."""
    held, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            held[0] = max(held[0], resident_bytes(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()


def run(model: Path, *given: Any) -> tuple[Result, int]:
    """Fill a context of 512 tokens; return how it ended, and the most that parent and child were seen to hold."""
    text = ("--raw", "--method=ignore-end", "-n", "200", "-t", "0", "--quiet", "--json")
    process = start("run", model, RIVER, *text, *given)
    with watching(process.pid) as held:
        result = finish(process)
    return result, held[0]


def memory_of(result: Result) -> dict[str, Any]:
    assert result.code == 0, result
    found: dict[str, Any] = json.loads(result.out)["memory"]
    return found


def is_near(held: int, planned: int) -> bool:
    """Return whether it is within what docs/memory.md promises."""
    return abs(held - planned) <= max(16 * MB, planned * 0.05)


@pytest.mark.parametrize(
    ("given", "gpu_mb"),
    [
        pytest.param((), 1000, id="all layers there", marks=pytest.mark.long),
        pytest.param((*own("mmap=no"), "--draft", "off"), 85, id="some layers here"),
    ],
)
def test_the_plan_is_what_both_hold(smollm_path: Path, addresses: str, given: tuple[str, ...], gpu_mb: int) -> None:
    """What is told is what somebody looking on saw, the child included, and what was planned."""
    result, seen = run(smollm_path, *options(addresses, "--memory", "600MB", "--gpu-layers", f"{gpu_mb}MB", *given))
    memory = memory_of(result)
    terms = {term["name"]: term["n_bytes"] for term in memory["terms"] if term["device"] == "host"}
    planned = memory["total_bytes"] - terms["reserve"] - terms.get("draft stores", 0)
    assert terms["process of the model"] == 50 * MB
    assert is_near(memory["peak_bytes"], planned), (memory["peak_bytes"], planned)
    assert is_near(seen, memory["peak_bytes"]), (seen, memory["peak_bytes"])
    on_devices = [device["total_bytes"] for device in memory["devices"]]
    assert [n_bytes > 0 for n_bytes in on_devices] == [gpu_mb < 1000, True]
    assert max(on_devices) <= gpu_mb * MB


@pytest.mark.parametrize("n_mb", [235, pytest.param(280, marks=pytest.mark.long)])
def test_both_keep_to_the_cap(smollm_path: Path, addresses: str, n_mb: int) -> None:
    """At no time do the two processes hold more than the cap, whatever has to be given up for it."""
    result, seen = run(smollm_path, *options(addresses, "--memory", f"{n_mb}MB"))
    memory = memory_of(result)
    assert memory["given_up"]
    assert memory["peak_bytes"] <= n_mb * MB
    assert 0.8 * memory["peak_bytes"] <= seen <= n_mb * MB


def test_what_one_process_could_keep_and_two_can_not_is_refused(smollm_path: Path, addresses: str) -> None:
    """The table names the process of the model; nothing is loaded."""
    given = options(addresses, "--memory", "170MB")
    result = run_process("run", smollm_path, RIVER, "--quiet", *given)
    assert result.code == REFUSED, result
    assert "process of the model" in result.err
    assert "over by" in result.err
    planned = run_process("plan", smollm_path, *given)
    assert planned.code == REFUSED
    assert b"process of the model" in planned.out
