"""How many Python functions a step calls, and how often a warm load parses a GGUF header.

    python benchmarks/overhead/calls.py smollm2-135m --json calls.json

Calls are what a profile reports as "call": Python functions, and generators that go on, in every thread; functions
written in C are left out. The texts are greedy, on the cpu runtime, with drafting off and with `auto`, which uses the
looked-up drafters and the model's head. A step is named by what happened in it: nothing was proposed, proposals were
not verified, or a draft was verified. The step with the median number of calls is printed, file by file.

With --texts N that many texts of the prompt are written together, and the calls are those of a common step, divided by
N; what happened is what happened for any of the texts.
"""

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import edgedec
from edgedec.decoding.samples import SampleStream
from edgedec.gguf.header import read_header
from edgedec_apps.bench.provenance import provenance

_PROMPT = "Question: Why is the sky blue, and why is it red in the evening?\nAnswer:"
_ROOTS = [Path(folder).resolve() for folder in sys.path if folder]
_WARM_UP = 32  # steps before counting begins
_KINDS = ("nothing proposed", "proposals not verified", "a draft verified")


def calls_of_a_step(name: str, draft: str, n_tokens: int, n_texts: int) -> Iterator[dict[str, Any]]:
    """Yield the calls of steps for each text, by what happened in the steps: in all, and by file."""
    steps: dict[str, list[Counter[str]]] = {kind: [] for kind in _KINDS}
    calls = Counter[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    threading.setprofile(note)  # the threads in which several texts are drafted for
    try:
        with edgedec.load(name, draft=draft, offline=True, runtime="cpu", n_texts=n_texts) as engine:
            options: Any = {"temperature": 0, "max_tokens": n_tokens, "ignore_end": True, "logprobs": None}
            one = engine.stream(_PROMPT, **options) if n_texts == 1 else None
            many = engine.samples_stream(_PROMPT, n_texts, **options) if n_texts > 1 else None
            before = _counts(one, many)
            calls.clear()
            sys.setprofile(note)
            for _ in one or many or ():
                sys.setprofile(None)
                now = _counts(one, many)
                if now[0] > before[0]:  # else it was a further token of the same step
                    if before[0] >= _WARM_UP * n_texts and now[0] == before[0] + n_texts:
                        kind = _KINDS[2 if now[1] > before[1] else 1 if now[2] > before[2] else 0]
                        steps[kind].append(Counter({_short(file): n for file, n in calls.items()}))
                    before = now
                    calls.clear()
                sys.setprofile(note)
            sys.setprofile(None)
    finally:
        threading.setprofile(None)
    for kind, found in steps.items():
        found.sort(key=Counter.total)
        if found:
            yield {
                "draft": draft,
                "kind": kind,
                "n_texts": n_texts,
                "n_steps": len(found),
                "median": round(found[len(found) // 2].total() / n_texts),
                "least": round(found[0].total() / n_texts),
                "most": round(found[-1].total() / n_texts),
                "by_file": dict(found[len(found) // 2].most_common()),
            }


def _counts(one: edgedec.TokenStream | None, many: SampleStream | None) -> tuple[int, int, float]:
    """Return the steps of all texts so far, the drafts verified in them, and the nodes that were proposed."""
    generations = (*([one.generation] if one else []), *(many.generations if many else []))
    stats = [generation.stats for generation in generations]
    n_nodes = sum(counts["nodes"] for each in stats for counts in each.drafters.values())
    return sum(each.n_steps for each in stats), sum(each.n_drafts for each in stats), n_nodes


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
    parser.add_argument(
        "--texts", type=int, default=1, metavar="N", help="texts of the prompt that are written together"
    )
    args = parser.parse_args()
    steps = [step for draft in ("off", "auto") for step in calls_of_a_step(args.model, draft, args.tokens, args.texts)]
    for step in steps:
        print(
            f"draft={step['draft']!r}, {step['kind']}: {step['median']} calls a step and text "
            f"({step['least']} to {step['most']}, {step['n_steps']} steps)"
        )
        print(*(f"  {n:4} {file}" for file, n in step["by_file"].items()), sep="\n")
    n_reads = header_reads(args.model)
    print(f"{n_reads} headers parsed by a warm load with draft='auto'")
    if args.json is not None:
        found = {"benchmark": "calls", "model": args.model, "steps": steps, "header_reads": n_reads}
        args.json.write_text(json.dumps(found | provenance(), indent=1) + "\n")


if __name__ == "__main__":
    main()
