"""Measure drafting for a model whose layers lie on another machine: rpc-servers behind a line with a delay.

    python benchmarks/speed/rpc_delay.py smollm2-135m --delays 0 5 20 --json-out rpc_delay.json

Starts rpc-servers on this machine and, before each of them, a proxy that delays what goes there and what comes back
(delaying_proxy.py), then decodes the prompts of `edgedec bench`, and texts that are copied from the prompt, with
drafts, without, and without once more, in changing order. For each delay: whether the texts are equal to those of the
model without RPC, the speedup by task and of the worst prompt, the noise, and T(n) as the engine measured it. Servers
and model share this machine's processor. With --draft-model a draft model drafts here, and with --overlap also a second
one, in turn with the first, that goes on while its target verifies; that target has servers of its own.
"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import edgedec
from edgedec.api.engine import Engine
from edgedec.api.options import DraftOptions
from edgedec.progress import CancelToken
from edgedec_apps.bench.measure import (
    PLAIN,
    Rounds,
    Runner,
    RunOptions,
    Trial,
    engine_runner,
    engine_runners,
    measure,
)
from edgedec_apps.bench.prompts import BenchPrompt, BenchRequest, prepare, read_prompts
from edgedec_apps.bench.provenance import report
from edgedec_apps.bench.summary import ratio, summarize, totals

_PROXY = Path(__file__).with_name("delaying_proxy.py")
_PORT = 50300  # always the same, so that what is measured once of a model on these servers is remembered
COPYING = "copying"
_PASSAGE, _BEGUN = 400, 12  # letters of a passage that is copied, and its tokens that the prompt ends with
OVERLAP = "overlap"


def wait_for(port: int) -> None:
    """Wait until somebody listens at a port."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"nobody listens at port {port}")


@contextmanager
def servers(n: int, delay_ms: float, n_threads: int = 1) -> Iterator[str]:
    """Yield the addresses of `n` servers of `n_threads` threads, behind lines of that delay, while the block runs."""
    processes = []
    addresses = []
    try:
        for index in range(n):
            port, near = _PORT + 2 * index, _PORT + 2 * index + 1
            server = [sys.executable, "-m", "edgedec_runtimes.llamacpp.rpc.server", "127.0.0.1", str(port)]
            server.append(str(n_threads))
            processes.append(subprocess.Popen(server, stdout=subprocess.DEVNULL))
            wait_for(port)
            proxy = [sys.executable, str(_PROXY), str(near), str(port), str(delay_ms)]
            processes.append(subprocess.Popen(proxy))
            wait_for(near)
            addresses.append(f"127.0.0.1:{near}")
        yield ",".join(addresses)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def copying(engine: Engine, prompts: list[BenchPrompt], n_most: int) -> list[BenchRequest]:
    """Return requests whose text is in the prompt three times already and begins a fourth time, from long prompts.

    The tokens are repeated, not the letters: a passage that begins in the middle of a token would be another text.
    """
    longest = sorted(prompts, key=lambda one: -len(one.text))[:n_most]
    requests = []
    for one in longest:
        passage = engine.prompt_ids(f"{one.text[-_PASSAGE:]}\n\n")
        ids = 3 * passage + passage[:_BEGUN]
        requests.append(BenchRequest(f"{COPYING}-{one.id}", COPYING, ids, 0))
    return requests


def texts(engine: Engine, requests: list[BenchRequest], options: RunOptions) -> list[tuple[int, ...]]:
    """Return the token ids of every text, plainly decoded."""
    return [engine.generate(one.token_ids, draft=False, **options.sampling(one.seed)).token_ids for one in requests]


def measured(runners: dict[str, Runner], requests: list[BenchRequest], n_rounds: int) -> tuple[list[Trial], float]:
    """Return the trials of all prompts, and the seconds of a pass with drafts before them that was not counted.

    In that pass it is measured which rows are exact in longer contexts, once for each load of the model.
    """
    cancel, started = CancelToken(), time.perf_counter()
    for runner in dict.fromkeys(run for run in runners.values() if run is not runners[PLAIN]):
        for request in requests:
            runner(request, cancel)
    warm_s = time.perf_counter() - started
    return measure(requests, runners, cancel, rounds=Rounds(n_rounds, 1 << 30)), warm_s


def main() -> None:
    """Measure each delay and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0], help="milliseconds, each way")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", help="only these")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--draft-model", help="drafts on this machine")
    parser.add_argument("--overlap", action="store_true", help="with the draft model: one more that drafts meanwhile")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    prompts = [one for one in read_prompts(per_task=args.per_task) if not args.tasks or one.task in args.tasks]
    options = RunOptions(args.max_tokens)
    load: dict[str, Any] = {"runtime": "llamacpp", "n_threads": 1, "n_ctx": 2048, "offline": True}
    with edgedec.load(args.model, draft="off", runtime_options={"repack": False}, **load) as here:
        requests = prepare(here, prompts, args.max_tokens)
        if not args.tasks or COPYING in args.tasks:
            requests += copying(here, read_prompts(), args.per_task)
        expected = texts(here, requests, options)
    results = {}
    for delay_ms in args.delays:
        with ExitStack() as stack:
            n_servers = args.servers * (1 + args.overlap)
            addresses = stack.enter_context(servers(n_servers, delay_ms, args.threads)).split(",")
            ways = load | {"draft": args.draft, "draft_model": args.draft_model}
            first, second = ",".join(addresses[: args.servers]), ",".join(addresses[args.servers :])
            there = stack.enter_context(
                edgedec.load(args.model, runtime_options={"rpc": first, "repack": False}, **ways)
            )
            runners = engine_runners(there, options)
            if args.overlap:
                other = stack.enter_context(
                    edgedec.load(
                        args.model,
                        runtime_options={"rpc": second, "repack": False},
                        drafting=DraftOptions(overlap=True),
                        **ways,
                    )
                )
                runners[OVERLAP] = engine_runner(other, options, draft=True)
            trials, warm_s = measured(runners, requests, args.rounds)
            curve = {n: round(1000 * seconds, 3) for n, seconds in there.pool.slots[0].curve.table().items()}
        by_id = {one.id: ids for one, ids in zip(requests, expected, strict=True)}
        differing = [
            trial.request.id
            for trial in trials
            if any(run.token_ids != by_id[trial.request.id] for run in trial.runs.values())
        ]
        results[f"{delay_ms:g}"] = summarize(trials) | {
            "unlike_without_rpc": differing,
            "warm_s": round(warm_s, 1),
            "curve_ms": curve,
        }
        if args.overlap:
            gain = ratio(totals(trials, PLAIN).decode_s, totals(trials, OVERLAP).decode_s)
            results[f"{delay_ms:g}"]["overlap_speedup"] = gain
            print(f"{delay_ms:g} ms, overlapped: {gain}", flush=True)
        shown = {task: round(one["speedup"] or 1.0, 3) for task, one in results[f"{delay_ms:g}"]["tasks"].items()}
        print(f"{delay_ms:g} ms", shown, results[f"{delay_ms:g}"]["noise"], "unequal:", differing, flush=True)
    settings = {
        name: getattr(args, name)
        for name in ("model", "servers", "threads", "per_task", "max_tokens", "rounds", "draft", "draft_model")
    }
    document = {"benchmark": "rpc_delay"} | settings | {"by_delay_ms": results}
    report(document, args.json_out)


if __name__ == "__main__":
    main()
