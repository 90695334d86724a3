"""How many Python functions a plain step calls, and how often a warm load parses a GGUF header.

    python benchmarks/overhead/calls.py smollm2-135m --json calls.json

A plain step evaluates one token and verifies no draft. Calls are what sys.setprofile reports as "call": Python
functions, and generators that go on; functions written in C are left out. The text is greedy, on the cpu runtime, once
with drafting off and once with `auto`. The step with the median number of calls is printed, file by file.
"""

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import edgedec
from edgedec.gguf.header import read_header
from edgedec_apps.bench.provenance import provenance

_PROMPT = "Question: Why is the sky blue, and why is it red in the evening?\nAnswer:"
_ROOTS = [Path(folder).resolve() for folder in sys.path if folder]
_WARM_UP = 32  # tokens before counting begins


def calls_of_a_step(name: str, draft: str, n_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the calls of plain steps, those with and those without a proposal apart: in all, and by file."""
    steps: dict[bool, list[Counter[str]]] = {False: [], True: []}
    with edgedec.load(name, draft=draft, offline=True, runtime="cpu") as engine:
        stream = engine.stream(_PROMPT, temperature=0, max_tokens=n_tokens, ignore_end=True)
        before = _counts(stream)
        for index in range(n_tokens):
            calls = _calls_of(lambda: next(stream))
            n_steps, n_drafts, n_nodes = _counts(stream)
            if index >= _WARM_UP and (n_steps, n_drafts) == (before[0] + 1, before[1]):
                steps[n_nodes > before[2]].append(calls)
            before = n_steps, n_drafts, n_nodes
        stream.close()
    for proposed, found in steps.items():
        found.sort(key=Counter.total)
        if found:
            yield {
                "draft": draft,
                "proposed": proposed,
                "n_steps": len(found),
                "median": found[len(found) // 2].total(),
                "least": found[0].total(),
                "most": found[-1].total(),
                "by_file": dict(found[len(found) // 2].most_common()),
            }


def _counts(stream: edgedec.TokenStream) -> tuple[int, int, float]:
    """Return the steps so far, the drafts verified in them, and the nodes that were proposed."""
    stats = stream.generation.stats
    return stats.n_steps, stats.n_drafts, sum(counts["nodes"] for counts in stats.drafters.values())


def header_reads(name: str) -> int:
    """Return how many headers the second load with draft="auto" parses, in all of its threads."""
    edgedec.load(name, draft="auto", offline=True, runtime="cpu").close()
    n_reads = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_reads
        n_reads += event == "call" and frame.f_code is read_header.__code__

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        engine = edgedec.load(name, draft="auto", offline=True, runtime="cpu")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    engine.close()
    return n_reads


def _calls_of(act: Callable[[], object]) -> "Counter[str]":
    """Return the calls of this thread while `act` runs, by the file of the function that is called."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is not act.__code__:
            counts[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return Counter({_short(file): n for file, n in counts.items()})


def _short(file: str) -> str:
    """Return a file's path below the folder that it is imported from."""
    below = [root for root in _ROOTS if Path(file).is_relative_to(root)]
    return file if not below else Path(file).relative_to(max(below, key=lambda root: len(root.parts))).as_posix()


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there, with where they come from")
    args = parser.parse_args()
    steps = [step for draft in ("off", "auto") for step in calls_of_a_step(args.model, draft, args.tokens)]
    for step in steps:
        what = f"draft={step['draft']!r}, {'proposals not verified' if step['proposed'] else 'nothing proposed'}"
        print(
            f"{what}: {step['median']} calls a plain step ({step['least']} to {step['most']}, {step['n_steps']} steps)"
        )
        print(*(f"  {n:4} {file}" for file, n in step["by_file"].items()), sep="\n")
    n_reads = header_reads(args.model)
    print(f"{n_reads} headers parsed by a warm load with draft='auto'")
    if args.json is not None:
        found = {"benchmark": "calls", "model": args.model, "steps": steps, "header_reads": n_reads}
        args.json.write_text(json.dumps(found | provenance(), indent=1) + "\n")


if __name__ == "__main__":
    main()
