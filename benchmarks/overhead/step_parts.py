"""What each part of a step costs in Python: microseconds a step, by part, everything but the native calls.

    python benchmarks/overhead/step_parts.py smollm2-135m --draft-head HEAD

Greedy answers to some prompts, alone without drafts, with `auto`, and with `auto` and a head. The parts are timed by
wrapping their functions; a part has the time of its own code, without the parts that it calls. What is not wrapped
(the stream, the detokenizer, the statistics) is "the rest". The wrappers cost about 1 microsecond a call each, so the
sum is a little more than benchmarks/overhead/overhead.py finds.

With --parallel N the requests run N at once, and their threads take turns with the interpreter. Then the only figure is
what lies between the native calls of a common forward: the time from the end of one to the beginning of the next.

Ends with a line of JSON.
"""

import argparse
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.decoding import step as step_module
from edgedec.decoding.text_loop import TextLoop
from edgedec.drafters.head import HeadDrafter
from edgedec.drafters.suffix.common import CommonDrafter
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.scheduler.policy import Policy
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu.library import native

_WRAPPED: tuple[tuple[Any, str, str], ...] = (
    (Policy, "propose", "policy: propose"),
    (Policy, "learn", "policy: learn"),
    (SuffixDrafter, "propose", "suffix: propose"),
    (SuffixDrafter, "learn", "suffix: learn"),
    (CommonDrafter, "propose", "common: propose"),
    (CommonDrafter, "learn", "common: learn"),
    (HeadDrafter, "propose", "head: propose"),
    (HeadDrafter, "learn", "head: learn"),
    (CostCurve, "observe", "cost curve: observe"),
    (step_module, "_propose", "step: propose"),
    (step_module, "evaluate", "step: forward"),
    (step_module, "_accept", "step: accept"),
    (step_module, "_learn", "step: learn"),
    (TextLoop, "stepped", "step: the rest"),
)
_NATIVE = ("ec_forward", "ec_draft_chains")
REST = "the rest"


class Clock:
    """Adds up the seconds of parts that call one another, in one thread; each has its own seconds alone.

    Attributes:
        seconds: By part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = self._seconds_off()
        self._stack = [REST]
        self._since = perf_counter()

    @staticmethod
    def _seconds_off() -> dict[str, float]:
        return defaultdict(float)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block only, for the rest at first."""
        self._now, self._since = self.seconds, perf_counter()
        try:
            yield
        finally:
            self.enter(REST)
            self.leave()
            self._now = self._seconds_off()

    def enter(self, part: str) -> None:
        """Count for a part from now on."""
        now = perf_counter()
        self._now[self._stack[-1]] += now - self._since
        self._stack.append(part)
        self._since = now

    def leave(self) -> None:
        """Count for the part again that called this one."""
        now = perf_counter()
        self._now[self._stack.pop()] += now - self._since
        self._since = now


class NativeTime:
    """Counts native calls of any thread, of which one runs at a time.

    Attributes:
        seconds: Of all of them.
        n_forwards: How many were forwards.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.n_forwards = 0
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Count a call."""
        with self._lock:
            self.seconds += seconds
            self.n_forwards += name == "ec_forward"


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap a function inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def timed(clock: Clock, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what turns a function into one whose time is counted for a part."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            clock.enter(part)
            try:
                return function(*args, **keywords)
            finally:
                clock.leave()

        return call

    return wrap


def counted(found: NativeTime, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what turns a native function into one whose time is counted."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = perf_counter()
            try:
                return function(*args)
            finally:
                found.add(name, perf_counter() - begun)

        return call

    return wrap


def alone(engine: edgedec.Engine, prompts: Sequence[str], n_tokens: int) -> dict[str, float]:
    """Return the microseconds a step of every part, answering one prompt after another; "steps" has their number."""
    clock, n_steps = Clock(), 0
    with ExitStack() as wrapped:
        for owner, name, part in _WRAPPED:
            wrapped.enter_context(replaced(owner, name, timed(clock, part)))
        for name in _NATIVE:
            wrapped.enter_context(replaced(native(), name, timed(clock, name)))
        for prompt in prompts:
            stream = engine.chat_stream([{"role": "user", "content": prompt}], temperature=0, max_tokens=n_tokens)
            next(stream)
            with clock.counting():
                for _ in stream:
                    pass
            n_steps += stream.generation.stats.n_steps
    return {part: 1e6 * seconds / n_steps for part, seconds in clock.seconds.items()} | {"steps": float(n_steps)}


def at_once(engine: edgedec.Engine, prompts: Sequence[str], n_tokens: int, n: int) -> dict[str, float]:
    """Return the microseconds a common forward of all native calls and of what lies between these."""
    found = NativeTime()

    def answer(prompt: str) -> int:
        return len(engine.chat([{"role": "user", "content": prompt}], temperature=0, max_tokens=n_tokens).token_ids)

    with ExitStack() as wrapped:
        for name in _NATIVE:
            wrapped.enter_context(replaced(native(), name, counted(found, name)))
        begun = perf_counter()
        with ThreadPoolExecutor(n) as pool:
            n_generated = sum(pool.map(answer, prompts))
        seconds = perf_counter() - begun
    return {
        "native": 1e6 * found.seconds / found.n_forwards,
        "between": 1e6 * (seconds - found.seconds) / found.n_forwards,
        "steps": float(found.n_forwards),
        "tokens_per_s": n_generated / seconds,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-head")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    prompts = [prompt.text for prompt in read_prompts(args.prompts, args.per_task)]
    ways: dict[str, dict[str, Any]] = {"off": {"draft": "off", "draft_head": "off"}, "auto": {"draft_head": "off"}}
    if args.draft_head is not None:
        ways["head"] = {"draft_head": args.draft_head}
    found: dict[str, dict[str, float]] = {}
    for way, options in ways.items():
        with edgedec.load(
            args.model, offline=True, runtime="cpu", n_ctx=2048, n_parallel=args.parallel, **options
        ) as engine:
            for _ in range(2):  # the first round warms
                engine.forget()
                if args.parallel == 1:
                    found[way] = alone(engine, prompts, args.max_tokens)
                else:
                    found[way] = at_once(engine, prompts, args.max_tokens, args.parallel)
    parts = list(dict.fromkeys(part for times in found.values() for part in times))
    print(f"{'microseconds a step':24}" + "".join(f"{way:>9}" for way in found))
    for part in sorted(parts, key=lambda part: (part in _NATIVE, part == "steps")):
        print(f"{part:24}" + "".join(f"{times.get(part, 0.0):9.0f}" for times in found.values()))
    if args.parallel == 1:
        python = [sum(us for part, us in times.items() if part not in (*_NATIVE, "steps")) for times in found.values()]
        print(f"{'all of Python':24}" + "".join(f"{us:9.0f}" for us in python))
    document = {"benchmark": "step_parts", "model": args.model, "parallel": args.parallel, "us_per_step": found}
    print(json.dumps(document | provenance()))


if __name__ == "__main__":
    main()
