"""Compare the tokenizers of edgedec_runtimes.tokenizer with llama.cpp's, for any model, and time them.

The script compares the ids of a multilingual corpus, of the same corpus with special tokens spelled out, and of random
strings over all planes of Unicode, each with and without special tokens added and parsed; and the bytes and the role
of every token. Times are medians. The memory is what a fresh process holds more after it has opened our tokenizer and
encoded the corpus.

    python benchmarks/texts/tokenizer_parity.py --count 20000 smollm2-135m qwen2.5-coder-0.5b gemma3-270m

With --pre, the vocabulary of a BPE model is compared under other pre-tokenizers' names, too ("all" for all that are
covered). Ends with one line of JSON; exit status 1 when anything differs.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.models.gguf_writer import write_gguf
from support.texts.token_oracle import differing_texts, differing_tokens, oracle
from support.texts.token_texts import SENTENCES, random_texts, spelled, written

from edgedec.gguf.file import GGUF, read_gguf
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.llamacpp.library import version
from edgedec_runtimes.tokenizer import open_tokenizer, refusal
from edgedec_runtimes.tokenizer.pretokenizers import NAMES

_N_SHOWN = 5


def special_texts(gguf: GGUF) -> list[str]:
    """Return the texts of up to 200 tokens that are control, user-defined or unknown."""
    types = gguf.metadata["tokenizer.ggml.token_type"]
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    return [text for text, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)][-200:]  # type: ignore[arg-type]  # arrays, as the tokenizer has opened


def compare(gguf: GGUF, count: int, seed: int) -> dict[str, Any]:
    """Compare everything and return the counts."""
    ours = open_tokenizer(gguf)
    special = special_texts(gguf) or ["<s>"]
    corpus = [*written(), *spelled(written(), special), *special]
    with oracle(gguf.paths[0]) as theirs:
        differing = {
            "corpus": differing_texts(ours, theirs, corpus),
            "random": differing_texts(ours, theirs, random_texts(count, special, seed)),
            "tokens": differing_tokens(ours, theirs),
        }
    for name, found in differing.items():
        for line in found[:_N_SHOWN]:
            print(f"  {name}: {line[:600]}", file=sys.stderr)
    counts = {"n_corpus": len(corpus), "n_random": count, "n_tokens": ours.n_vocab}
    return counts | {f"n_differing_{name}": len(found) for name, found in differing.items()}


def measure(gguf: GGUF, runs: int) -> dict[str, Any]:
    """Return the times of opening and of encoding 10,000 characters of prose and of code, ours and llama.cpp's."""
    ours = open_tokenizer(gguf)
    prose = (" ".join(SENTENCES[:6]) * 100)[:10_000]
    code = Path(__file__).read_text(encoding="utf-8").ljust(10_000, "x")[:10_000]
    mixed = "".join(random_texts(600, ["x"], seed=1))[:10_000]
    figures: dict[str, Any] = {
        "header_s": _time(lambda: read_gguf(gguf.paths[0]), runs),
        "open_s": _time(lambda: open_tokenizer(gguf), runs),
        "added_mb": _added_mb(gguf.paths[0]),
    }
    with oracle(gguf.paths[0]) as theirs:
        for name, text in (("prose", prose), ("code", code), ("mixed", mixed)):
            figures[f"{name}_first_s"] = _time(partial(_forgetful, gguf, text), runs)
            figures[f"{name}_again_s"] = _time(partial(ours.encode, text), runs)
            figures[f"{name}_llamacpp_s"] = _time(partial(theirs.encode, text), runs)
    return figures


def _forgetful(gguf: GGUF, text: str) -> float:
    """Time a first encoding, with no word remembered."""
    tokenizer: Tokenizer = open_tokenizer(gguf)
    started = time.perf_counter()
    tokenizer.encode(text)
    return time.perf_counter() - started


def _time(call: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        result = call()
        times.append(result if isinstance(result, float) else time.perf_counter() - started)
    return round(median(times), 4)


def _added_mb(path: Path) -> float | None:
    """Return what opening adds to the resident memory of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_weigh, (path,))


def _weigh(path: Path) -> float | None:
    gguf = read_gguf(path)
    before = _resident_mb()
    tokenizer = open_tokenizer(gguf)
    tokenizer.encode(" ".join(written()))
    gc.collect()
    after = _resident_mb()
    return None if before is None or after is None else round(after - before, 1)


def _resident_mb() -> float | None:
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    line = next(line for line in path.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def renamed(gguf: GGUF, pre: str, path: Path) -> GGUF:
    """Write the vocabulary of a BPE model under another pre-tokenizer's name."""
    vocabulary = {key: value for key, value in gguf.metadata.items() if key.startswith("tokenizer.ggml.")}
    arrays = {key: value if isinstance(value, str | int) else _array(value) for key, value in vocabulary.items()}
    write_gguf(path, {"general.architecture": "llama"} | arrays | {"tokenizer.ggml.pre": pre})
    return read_gguf(path)


def _array(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") and value.element_type.name == "STRING" else value.numpy()


def run(name: str, pres: Sequence[str], count: int, seed: int, runs: int) -> dict[str, Any]:
    """Compare and time one model."""
    gguf = read_gguf(resolve(name, ResolveOptions()))
    reason = refusal(gguf)
    if reason is not None:
        print(f"{name}: not covered: {reason}")
        return {"refused": reason}
    figures = measure(gguf, runs) | compare(gguf, count, seed)
    print(f"{name:22} " + "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for pre in pres if gguf.metadata["tokenizer.ggml.model"] == "gpt2" else ():
            other = compare(renamed(gguf, pre, Path(folder) / "renamed.gguf"), count, seed)
            print(f"{name:22} as {pre:20} " + "  ".join(f"{key} {value}" for key, value in other.items()), flush=True)
            figures[f"as_{pre}"] = other
    return figures


def _differs(figures: dict[str, Any]) -> bool:
    return any(
        _differs(value) if isinstance(value, dict) else key.startswith("n_differing") and value > 0
        for key, value in figures.items()
    )


def main() -> int:
    """Parse arguments, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pre", action="append", default=[], metavar="NAME")
    args = parser.parse_args()
    pres = sorted(NAMES - {""}) if args.pre == ["all"] else args.pre
    results = {name: run(name, pres, args.count, args.seed, args.runs) for name in args.models}
    print(json.dumps({"models": results, "seed": args.seed, "llamacpp": version()}))
    return 1 if _differs(results) else 0


if __name__ == "__main__":
    sys.exit(main())
