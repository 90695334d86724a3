"""Measure two models that write in turn, in speed and in answers: each threshold against the large model alone.

    python benchmarks/answers/switching.py qwen2.5-coder-1.5b qwen2.5-coder-0.5b --prompts FILE --task math_reasoning

Each prompt is answered greedily by the large model alone, then by the pair with every threshold. The script prints the
share of tokens that the small model wrote, how many answers have the large model's last number, and the speed: the
processor time of as many plain steps of the large model, over the processor time of the pair's steps, the reading at
each change included. Both are from the same minutes, so other work on the machine changes the ratio little, and
processor time leaves out waiting for the processor. With more than one thread it includes their waiting for each
other. Ends with one line of JSON.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import edgedec
from edgedec.decoding.step import Decoder, step
from edgedec.model import Session
from edgedec.sampling import Noise, SamplingParams
from edgedec.sequence import Request, TextState
from edgedec_apps.bench.prompts import read_prompts
from edgedec_apps.bench.provenance import provenance
from edgedec_methods.switching import LARGE, SMALL, SwitchingSession

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_N_CTX = 1024
_PARAMS = SamplingParams(temperature=0.0, seed=0)


def last_number(text: str) -> float | None:
    """Return the last number of an answer.

    >>> last_number("So it costs $1,306.50.")
    1306.5
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def write(
    session: Session, engine: edgedec.Engine, prompt: Sequence[int], n_tokens: int
) -> tuple[list[int], list[float]]:
    """Return the tokens that are written after a prompt, and the processor seconds of each step after the first."""
    sequence = TextState(Request(tuple(prompt), _PARAMS, 0), list(prompt))
    decoder, seconds = Decoder(session, Noise(0), None), list[float]()
    while sequence.n_generated < n_tokens:
        begun = process_time()
        step(sequence, decoder)
        seconds.append(process_time() - begun)
        if engine.tokenizer.is_end(sequence.token_ids[-1]):
            del sequence.token_ids[-1]
            break
    return sequence.token_ids[len(prompt) :], seconds[1:]


def answer(session: SwitchingSession, engine: edgedec.Engine, prompt: Sequence[int], n_tokens: int) -> dict[str, Any]:
    """Write an answer in turn; return it, who wrote it, and its times by kind of step."""
    session.begin(len(prompt))
    tokens, seconds = write(session, engine, prompt, n_tokens)
    writers = [token.writer for token in session.written]
    changes = [i for i in range(1, len(writers)) if writers[i] != writers[i - 1]]
    plain = [i for i in range(1, len(writers)) if i not in changes]
    return {
        "text": engine.tokenizer.decode(tokens),
        "tokens": len(writers),
        "small": writers.count(SMALL),
        "entropy": fmean(token.entropy for token in session.written),
        "large_s": [seconds[i - 1] for i in plain if writers[i] == LARGE],
        "small_s": [seconds[i - 1] for i in plain if writers[i] == SMALL],
        "change_s": [seconds[i - 1] for i in changes],
    }


def summary(entropy: float, found: list[dict[str, Any]], numbers: list[float | None]) -> dict[str, Any]:
    """Return the figures of one threshold."""
    times = {name: [s for each in found for s in each[name]] for name in ("large_s", "small_s", "change_s")}
    n_steps, total = sum(map(len, times.values())), sum(map(sum, times.values()))
    own = [last_number(each["text"]) for each in found]
    return {
        "entropy": entropy,
        "small_share": sum(each["small"] for each in found) / sum(each["tokens"] for each in found),
        "switches": len(times["change_s"]) / len(found),
        "mean_entropy": fmean(each["entropy"] for each in found),
        "ratio": n_steps * fmean(times["large_s"]) / total,
        "large_ms": 1000 * fmean(times["large_s"]),
        "small_ms": 1000 * fmean(times["small_s"]) if times["small_s"] else None,
        "change_ms": 1000 * fmean(times["change_s"]) if times["change_s"] else None,
        "numbers": own,
        "same_number": sum(mine == theirs for mine, theirs in zip(own, numbers, strict=True)),
        "texts": [each["text"] for each in found],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("large")
    parser.add_argument("small")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--task", default="math_reasoning")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--entropies", type=float, nargs="+", default=[0.15, 0.35, 0.5, 0.75, 1.0, 1.5])
    args = parser.parse_args()
    options: dict[str, Any] = {"runtime": "cpu", "n_ctx": _N_CTX, "offline": True, "draft": "off"}
    options["n_threads"] = args.threads
    with edgedec.load(args.large, **options) as large, edgedec.load(args.small, **options) as small:
        asked = [prompt.text for prompt in read_prompts(args.prompts) if prompt.task == args.task][: args.count]
        prompts = [large.chat_ids([{"role": "user", "content": text}]) for text in asked]
        alone = [write(large.session(), large, prompt, args.tokens)[0] for prompt in prompts]
        texts = [large.tokenizer.decode(tokens) for tokens in alone]
        numbers = [last_number(text) for text in texts]
        print(f"large alone: {numbers}", flush=True)
        rows = []
        for entropy in args.entropies:
            session = SwitchingSession(large.session(), small.session(), entropy)
            row = summary(entropy, [answer(session, large, prompt, args.tokens) for prompt in prompts], numbers)
            print({name: value for name, value in row.items() if name != "texts"}, flush=True)
            rows.append(row)
            session.close()
    figures = {"large": args.large, "small": args.small, "task": args.task, "tokens": args.tokens, "texts": texts}
    print(json.dumps({"benchmark": "switching", "threads": args.threads, **figures, "rows": rows, **provenance()}))


if __name__ == "__main__":
    main()
