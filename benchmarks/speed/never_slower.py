"""Measure `--draft auto` against no drafts where drafts bring little: several texts at once, sampling, grammars.

    python benchmarks/speed/never_slower.py samples requests
    python benchmarks/speed/never_slower.py one --model MIXTURE     # a file with a mixture of experts

Three engines in one process, `auto` and two without drafts, answer the same requests in turn, in another order each
round; the third tells what the measurement is worth. Each round has another prompt and other seeds; every text must be
equal. The cases are named in CASES. A case whose model is "mixture" or "lfm2" takes a tiny one with random weights,
whose forwards take less than the Python beside them. Printed is the median over the rounds of the tokens per second,
prefill included, in times of plain decoding in the same round. With --out the cases are added to a file; the exit code
is 1 where a text differs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from edgedec_apps.bench.provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.grammar import Grammar
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts

Texts = list[tuple[int, ...]]
PATTERN = r"([A-Z][a-z]+( [a-z]+){3,12}\. ){4}"
TINY = {"mixture": "qwen3moe", "lfm2": "lfm2"}


def samples(engine: edgedec.Engine, n: int, prompt: str, given: dict[str, Any]) -> Texts:
    """Return n texts of one prompt."""
    return [text.token_ids for text in engine.samples(prompt, n, **given)]


def chat(engine: edgedec.Engine, n: int, prompt: str, given: dict[str, Any]) -> Texts:
    """Return n answers to one message."""
    return [text.token_ids for text in engine.samples([{"role": "user", "content": prompt}], n, **given)]


def requests(engine: edgedec.Engine, n: int, prompt: str, given: dict[str, Any]) -> Texts:
    """Return the texts of n requests at once, which have seeds of their own."""
    with ThreadPoolExecutor(n) as pool:
        return list(
            pool.map(lambda k: engine.generate(prompt, **given | {"seed": given["seed"] + k}).token_ids, range(n))
        )


def regex(engine: edgedec.Engine, n: int, prompt: str, given: dict[str, Any]) -> Texts:
    """Return n texts under a regular expression, one after another."""
    given = {name: value for name, value in given.items() if name != "ignore_end"}
    seeds = range(given["seed"], given["seed"] + n)
    grammar = Grammar.regex(PATTERN)
    return [engine.generate(prompt, **given | {"seed": seed, "grammar": grammar}).token_ids for seed in seeds]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: who answers `n` requests or texts, at which temperature; the model, None for the one named."""

    answer: Callable[[edgedec.Engine, int, str, dict[str, Any]], Texts]
    n: int
    temperature: float = 1.2
    model: str | None = None


CASES = {
    "samples": Case(samples, 8),
    "chat": Case(chat, 4, 0.8),
    "requests": Case(requests, 4),
    "regex": Case(regex, 1, 0.8),
    "one": Case(samples, 1),
    **{f"{kind}-samples": Case(samples, 8, model=kind) for kind in TINY},
    **{f"{kind}-requests": Case(requests, 4, model=kind) for kind in TINY},
    **{f"{kind}-one": Case(requests, 1, model=kind) for kind in TINY},
}


def measured(
    case: Case, model: str | Path, prompts: Sequence[str], n_rounds: int, max_tokens: int, *, new: bool
) -> tuple[dict[str, list[float]], int]:
    """Return the tokens per second of `auto`, of plain decoding and of that again, and how many texts differ.

    With `new`, each round finds nothing that earlier ones have shown, as a new process does.
    """
    n_parallel = case.n if case.answer is requests else 1
    load: dict[str, Any] = {"runtime": "cpu", "offline": True, "n_ctx": 2048 if case.model is None else 512}
    rates: dict[str, list[float]] = {"auto": [], "plain": [], "again": []}
    differ = 0
    with ExitStack() as opened:
        auto = opened.enter_context(edgedec.load(model, draft="auto", n_parallel=n_parallel, **load))
        plain, again = (
            opened.enter_context(edgedec.load(model, draft=None, n_parallel=n_parallel, **load)) for _ in range(2)
        )
        engines = [("auto", auto), ("plain", plain), ("again", again)]
        for i in range(n_rounds + 1):
            given = {"temperature": case.temperature, "seed": 1000 * i, "max_tokens": max_tokens, "ignore_end": True}
            found: dict[str, Texts] = {}
            if new:
                auto.forget()
            for way, engine in engines[i % 3 :] + engines[: i % 3]:
                engine.generate([1, 2, 3], max_tokens=1)  # so that each way reads the whole prompt
                begun = perf_counter()
                found[way] = case.answer(engine, case.n, prompts[i % len(prompts)], given)
                seconds = perf_counter() - begun
                if i:  # the first round warms both
                    rates[way].append(sum(map(len, found[way])) / seconds)
            differ += sum(a != b for a, b in zip(found["auto"], found["plain"], strict=True))
    return rates, differ


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--new", action="store_true", help="forget before each round what earlier ones have shown")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = [prompt.text for prompt in read_prompts(args.prompts, 2)]
    n_differ, known = 0, {}
    if args.out is not None and args.out.exists():
        known = json.loads(args.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases:
            case, model = CASES[name], args.model
            asked = prompts
            if case.model is not None:
                types = ("Q4_K", "Q6_K")
                tiny = ARCHITECTURES[TINY[case.model]]
                model = write_tiny(Path(folder) / f"{case.model}.gguf", replace(tiny, types=types))
                asked = [prompt[:100] for prompt in prompts]
            rates, differ = measured(case, model, asked, args.rounds, args.max_tokens, new=args.new)
            n_differ += differ
            ratio, control = (
                median(ours / plain for ours, plain in zip(rates[way], rates["plain"], strict=True))
                for way in ("auto", "again")
            )
            print(f"{name}: auto {ratio:.3f} x plain, plain again {control:.3f}; {differ} texts differ", flush=True)
            known[f"{name}, new" if args.new else name] = {
                "model": str(args.model) if case.model is None else f"tiny {TINY[case.model]}",
                "n": case.n,
                "temperature": case.temperature,
                "max_tokens": args.max_tokens,
                "ratio": ratio,
                "control": control,
                "tokens_per_s": rates,
                "different": differ,
                **provenance(),
            }
    if args.out is not None:
        args.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(n_differ))


if __name__ == "__main__":
    main()
