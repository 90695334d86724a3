"""Measure what a process holds at its peak under caps from too small to ample.

    python benchmarks/memory/memory_caps.py smollm2-135m --contexts 512 2048 8192 --runtimes cpu llamacpp

For every model, context and runtime, `edgedec plan` says how much memory the model would take without a cap; the caps
are shares of that. Under each, `edgedec run --memory CAP` reads a prompt that leaves room for the new tokens only, and
generates those. A run must stay at or below its cap, or be refused before it starts, where even the smallest plan is
over it. The peak is the most resident memory that the system counted of the process (VmHWM); the prediction is the
plan's total without its reserve, and without what drafters keep for later requests, because there are none.

--prompt-tokens stops the prompt sooner, where reading it would take too long and what is held does not depend on it
(llama.cpp clears its whole KV cache at once). --cache fresh lets each run make the tile cache, --cache none points it
to where nothing can be written. --cgroup runs each in a control group of its own whose hard limit is the cap (but 100
MB at least, for an interpreter that can say no): what the system counts there is more than the resident size (page
tables, files' pages that nobody maps), and a process that needs more is killed.

--servers N puts layers on N rpc-servers, which are started anew for each run on this machine, under each of the caps of
--gpu-memory for a server's device. The host then is two processes; what they held is what somebody looking on 500 times
a second saw of both at one time, beside what the product itself says. A server held what its peak has more than the
server held before the load.

--json-out is written after each run, which names its commit; runs already in it are not done again. Ends with one line
of JSON.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "speed"))

from held_together import status_bytes, watching
from own_cgroup import own_cgroup
from rpc_delay import wait_for

import edgedec
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.terms import STORES
from edgedec.memory_plan import parse_size
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance

_SHARES = (0.15, 0.3, 0.75, 0.85, 0.92, 0.97, 1.0, 1.2)
_TEXT = (
    files("edgedec_apps") / "evaluation" / "text.txt"
)  # prose and code: many different tokens, whose embeddings are looked up
_REFUSED = 50  # MemoryCapError's exit code
_LEAST_GROUP = 100_000_000
_SLACK_BYTES, _SLACK = 16_000_000, 0.05


class Servers:
    """Some rpc-servers of one thread each on this machine.

    Attributes:
        addresses: Their "host:port"s, separated by commas.
    """

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"], ports: Sequence[int]) -> None:
        self._pids = [process.pid for process in processes]
        self._before = [status_bytes(pid, "VmRSS") for pid in self._pids]
        self.addresses = ",".join(f"127.0.0.1:{port}" for port in ports)

    def held_bytes(self) -> list[int]:
        """Return what each of them held at its peak beyond what it held at first."""
        return [status_bytes(pid, "VmHWM") - before for pid, before in zip(self._pids, self._before, strict=True)]


@contextmanager
def servers(n: int) -> Iterator[Servers]:
    """Yield `n` servers, which run inside the block."""
    processes, ports = [], []
    try:
        for _ in range(n):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports.append(free.getsockname()[1])
            command = [sys.executable, "-m", "edgedec_runtimes.llamacpp.rpc.server", "127.0.0.1", str(ports[-1]), "1"]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for port in ports:
            wait_for(port)
        yield Servers(processes, ports)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_servers(
    model: str, context: int, runtime: str, share: float, gpu_memory: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Run under one cap for the host and one for each server's device; return what was planned and held there."""
    found: dict[str, Any] = {"servers": args.servers, "gpu_memory": gpu_memory}
    with servers(args.servers) as started:
        options = (
            "--runtime-option",
            f"rpc={started.addresses}",
            "--runtime-option",
            "repack=no",
            "--gpu-memory",
            gpu_memory,
        )
        found = measure(model, context, runtime, share, args, options) | found
        devices = found.get("devices", [])
        for device, held in zip(devices, started.held_bytes(), strict=False):
            device["held_bytes"] = held
            device["kept"] = held <= parse_size(gpu_memory)
            device["near"] = _is_near(held, device["planned_bytes"])
    found["kept"] = found["kept"] and all(device["kept"] for device in devices)
    found["near"] = found["near"] and all(device["near"] for device in devices)
    return found


def measure(
    model: str, context: int, runtime: str, share: float, args: argparse.Namespace, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run under one cap, a share of what is wished; return what was planned and what was held.

    `more` are further options of the command.
    """
    cap = int(_wished_bytes(model, context, runtime, more) * share)
    found: dict[str, Any] = {"model": model, "context": context, "runtime": runtime, "share": share}
    found |= {"cache": args.cache, "cgroup": args.cgroup, "cap_bytes": cap, "commit": provenance()["commit"]}
    file = str(resolve(model, ResolveOptions(cache_folder(), offline=True)))  # the run's cache may be another
    with ExitStack() as stack:
        environment = dict(os.environ)
        if args.cache == "fresh":
            environment["EDGEDEC_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory())
        elif args.cache == "none":
            environment["EDGEDEC_CACHE"] = os.devnull
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompt, out = folder / "prompt.txt", folder / "out.json"
        n_new = min(args.new_tokens, context // 2)
        found["prompt_tokens"] = min(context - n_new - 8, args.prompt_tokens or context)
        prompt.write_text(_prompt(model, found["prompt_tokens"]), encoding="utf-8")
        options = ("--raw", "--quiet", "--ignore-end", "--max-tokens", str(n_new), "--temperature", "0")
        paths = ("--file", str(prompt), "--json-out", str(out))
        command = [*_command("run", file, context, runtime, cap), *more, *paths, *options]
        if args.cgroup:
            group = stack.enter_context(own_cgroup(max(cap, _LEAST_GROUP)))
            code, error, seen = _run(group.command(command), environment)
            found |= {"cgroup_peak_bytes": group.peak_bytes(), "killed": group.n_killed()}
        else:
            code, error, seen = _run(command, environment)
        if code == _REFUSED:
            fits = _plan(file, context, runtime, cap, more, environment)["fits"]
            return found | {"refused": True, "kept": not fits, "near": True, "given_up": []}
        if code != 0:
            return found | {"kept": False, "near": False, "given_up": [], "error": error}
        document = json.loads(out.read_text(encoding="utf-8"))
    plan, stats = document["memory"], document["stats"]
    peak = plan["peak_bytes"]
    if more:
        devices = [{"name": one["name"], "planned_bytes": one["total_bytes"]} for one in plan["devices"]]
        found |= {"told_peak_bytes": peak, "devices": devices}
        peak = seen
    later = sum(term["n_bytes"] for term in plan["terms"] if term["name"] in ("reserve", STORES))
    predicted = plan["total_bytes"] - later
    return found | {
        "given_up": plan["given_up"],
        "predicted_bytes": predicted,
        "peak_bytes": peak,
        "kept": peak <= cap,
        "near": _is_near(peak, predicted),
        "tokens_per_s": stats["tokens_per_s"],
        "reasons": [*stats["notes"], *stats["reasons"]],
    }


def _is_near(held: int, predicted: int) -> bool:
    return abs(held - predicted) <= max(_SLACK_BYTES, _SLACK * predicted)


def _command(name: str, model: str, context: int, runtime: str, cap: int | None) -> list[str]:
    memory = [] if cap is None else ["--memory", str(cap)]
    return [
        *(sys.executable, "-m", "edgedec_apps.cli", name, model, "--offline"),
        *("--context", str(context), "--runtime", runtime, *memory),
    ]


@cache
def _wished_bytes(model: str, context: int, runtime: str, more: tuple[str, ...]) -> int:
    return int(_plan(model, context, runtime, None, more)["total_bytes"])


def _plan(
    model: str,
    context: int,
    runtime: str,
    cap: int | None,
    more: tuple[str, ...],
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    command = [*_command("plan", model, context, runtime, cap), *more, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@cache
def _prompt(model: str, n_tokens: int) -> str:
    """Return a text of that many tokens."""
    with edgedec.load(model, draft="off", offline=True, n_ctx=64, runtime="cpu") as engine:
        tokenizer = engine.model.tokenizer
        ids = tokenizer.encode(_TEXT.read_text(encoding="utf-8"))
        ids = (ids * (n_tokens // len(ids) + 1))[: max(1, n_tokens)]
        return b"".join(tokenizer.piece(token) for token in ids).decode("utf-8", errors="replace")


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str, int]:
    """Return exit code, the end of standard error, and the most bytes that process and child were seen to hold."""
    with (
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        ) as process,
        watching(process.pid) as held,
    ):
        _, error = process.communicate()
    return process.returncode, error[-400:], held.peak_bytes


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, int, str, float, str | None]]:
    for model in args.models:
        for context in args.contexts:
            for runtime in args.runtimes:
                for gpu_memory in args.gpu_memory if args.servers else [None]:
                    for share in args.shares:
                        yield model, context, runtime, share, gpu_memory


def _key(found: dict[str, Any]) -> tuple[Any, ...]:
    """Return which case this is."""
    names = ("model", "context", "runtime", "share", "gpu_memory", "cache", "cgroup", "servers")
    return tuple(found.get(name) for name in names)


def _line(found: dict[str, Any]) -> str:
    start = f"{found['model']} {found['runtime']} {found['context']}: allowed {found['cap_bytes'] / 1e6:.1f} MB"
    start += f" and {found['gpu_memory']} on servers" if "gpu_memory" in found else ""
    if "peak_bytes" not in found:
        return f"{start}, {found.get('error', 'refused')}{'' if found['kept'] else ' NOT KEPT'}"
    return (
        f"{start}, predicted {found['predicted_bytes'] / 1e6:.1f}, held {found['peak_bytes'] / 1e6:.1f}"
        f"{'' if found['kept'] else ' NOT KEPT'}{'' if found['near'] else ' FAR OFF'}"
        f"{f', KILLED {n}' if (n := found.get('killed')) else ''}"
        f"{''.join(map(_device_line, found.get('devices', [])))}, "
        f"{found['tokens_per_s']:.1f} tokens/s; {', '.join(found['given_up']) or 'as wished'}"
    )


def _device_line(device: dict[str, Any]) -> str:
    return f", on {device['name']} {device['planned_bytes'] / 1e6:.1f} and {device['held_bytes'] / 1e6:.1f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--runtimes", nargs="+", default=["cpu"])
    parser.add_argument("--shares", nargs="+", type=float, default=list(_SHARES))
    parser.add_argument("--new-tokens", type=int, default=512, help="at most half of the context")
    parser.add_argument("--prompt-tokens", type=int, help="at most; otherwise all that the context has room for")
    parser.add_argument("--cache", choices=("kept", "fresh", "none"), default="kept")
    parser.add_argument("--servers", type=int, default=0, help="rpc-servers on this machine; 0 for none")
    parser.add_argument("--gpu-memory", nargs="+", default=["1GB"], help="caps of each server's device")
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--cgroup", action="store_true", help="each in a control group limited to the cap (Linux)")
    args = parser.parse_args()
    document = {"benchmark": "memory_caps"} | provenance() | {"results": []}
    if args.json_out is not None and args.json_out.exists():
        document["results"] = json.loads(args.json_out.read_text(encoding="utf-8"))["results"]
    done = {_key(found) for found in document["results"]}
    for case in _cases(args):
        if (*case, args.cache, args.cgroup, args.servers or None) in done:
            continue
        model, context, runtime, share, gpu_memory = case
        if gpu_memory is None:
            found = measure(model, context, runtime, share, args)
        else:
            found = measure_servers(model, context, runtime, share, gpu_memory, args)
        document["results"].append(found)
        print(_line(found), flush=True)
        if args.json_out is not None:
            args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
