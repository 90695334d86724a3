"""Measure what a memory cap costs in speed: whole processes with and without the cap, in turn, on the same prompts.

    python benchmarks/speed/capped_speed.py qwen2.5-coder-1.5b --context 4096 --memory 1320MB

Every prompt is answered twice a round by `edgedec run`, once under the cap and once without, and the order changes
from prompt to prompt. The script compares the tokens per second after the first token, and the time to the first one.
The texts must be equal. It ends with one line of JSON; the exit code is 1 where a text differs or a process held more
than its cap.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from edgedec.memory_plan import parse_size
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgedec_apps.bench.provenance import provenance


def answer(model: str, prompt: str, args: argparse.Namespace, cap: str | None) -> dict[str, Any]:
    """Run one process; return the document of --json-out."""
    with tempfile.TemporaryDirectory() as name:
        file, out = Path(name) / "prompt.txt", Path(name) / "out.json"
        file.write_text(prompt, encoding="utf-8")
        command = [sys.executable, "-m", "edgedec_apps.cli", "run", model, "--offline", "--quiet", "--temperature", "0"]
        command += ["--file", str(file), "--json-out", str(out), "--max-tokens", str(args.max_tokens)]
        command += ["--context", str(args.context), "--runtime", args.runtime]
        command += [] if cap is None else ["--memory", cap]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return document


def compare(model: str, prompt: str, args: argparse.Namespace, *, capped_first: bool) -> dict[str, Any]:
    """Answer a prompt under the cap and without it."""
    caps = (args.memory, None) if capped_first else (None, args.memory)
    found = {cap: answer(model, prompt, args, cap) for cap in caps}
    capped, free = found[args.memory], found[None]
    return {
        "equal": capped["text"] == free["text"],
        "kept": capped["memory"]["peak_bytes"] <= parse_size(args.memory),
        "peak_bytes": capped["memory"]["peak_bytes"],
        "peak_bytes_without": free["memory"]["peak_bytes"],
        "given_up": capped["memory"]["given_up"],
        "tokens_per_s": capped["stats"]["tokens_per_s"],
        "tokens_per_s_without": free["stats"]["tokens_per_s"],
        "ratio": capped["stats"]["tokens_per_s"] / free["stats"]["tokens_per_s"],
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--runtime", default="cpu")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, args.per_task) * args.rounds
    results = []
    for i, prompt in enumerate(prompts):
        found = compare(args.model, prompt.text, args, capped_first=i % 2 == 0)
        results.append({"task": prompt.task, **found})
        print(
            f"{prompt.task:16} {found['tokens_per_s']:6.1f} of {found['tokens_per_s_without']:6.1f} tokens/s, "
            f"{found['peak_bytes'] / 1e6:.0f} of {found['peak_bytes_without'] / 1e6:.0f} MB"
            f"{'' if found['equal'] else ' TEXTS DIFFER'}{'' if found['kept'] else ' CAP NOT KEPT'}",
            flush=True,
        )
    ratios = [found["ratio"] for found in results]
    print(f"median {median(ratios):.3f}, least {min(ratios):.3f}, most {max(ratios):.3f}")
    document = {"benchmark": "capped_speed", "model": args.model, "memory": args.memory, "context": args.context}
    print(json.dumps(document | {"median": median(ratios), "results": results} | provenance()))
    sys.exit(not all(found["equal"] and found["kept"] for found in results))


if __name__ == "__main__":
    main()
