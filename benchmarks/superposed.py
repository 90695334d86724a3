"""Compare Superposed Decoding with real forks: the quality of k short continuations, and the time that they take.

    python benchmarks/superposed.py --model smollm2-135m --ngrams docs
    python benchmarks/superposed.py --timed qwen2.5-coder-1.5b

Superposed Decoding (Shen et al. 2024, arXiv:2405.18400) writes k continuations with one row a token: their latest
tokens enter the model as one embedding, weighted by their probabilities. The row's distribution is mixed with n-grams
of each continuation (weight 0.54, as in the paper; 2 to 4 tokens, from the text files of a folder), and the k best of
all extensions stay. The way "forks" keeps the k best by a row for each continuation, which is beam search. Each
continuation is scored by the model alone. Times are of single rows and of k forks on the cpu runtime.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import provenance
from rich.console import Console
from rich.progress import track

import edgedec
from edgedec.choosing.beam import beam_search
from edgedec.gguf.file import read_gguf
from edgedec.gguf.levels import dequantize
from edgedec.gguf.tensor_types import GGMLType
from edgedec.loading.resolve import resolve
from edgedec.resolver import ResolveOptions
from edgedec.tokenizer import Tokenizer
from edgedec_export.gguf_writer import OutTensor, file_pieces, read_entries, write_gguf
from edgedec_runtimes.reference.network import KVCache, Row, embeddings, evaluate, logits

PROMPTS = (
    "The best way to learn a new language is to",
    "My favourite thing to cook in the winter is",
    "When the storm had passed, the sailors",
    "The city council decided last week that",
    "A computer program is a",
    "If you want to sleep better, you should",
    "The history of the railway begins",
    "She opened the old letter and",
)
_ALPHA = 0.54  # of the n-grams
_SHARES = {4: 0.6, 3: 0.3, 2: 0.1}  # of the n-grams by their length
_EXTENSIONS = 50  # of each continuation that are considered

Floats = NDArray[np.float64]
NextTokens = Callable[[Sequence[int]], dict[int, float]]


def log_softmax(row: NDArray[Any]) -> Floats:
    """Return the log-probabilities of a row of logits."""
    wide = row.astype(np.float64) - float(row.max())
    return np.asarray(wide - math.log(float(np.exp(wide).sum())))


def ngrams_of(tokenizer: Tokenizer, folder: Path | None) -> NextTokens:
    """Return a function from a text to the probabilities of the next token, by n-grams of the files of a folder."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    files = sorted(folder.rglob("*.md")) + sorted(folder.rglob("*.txt")) if folder else []
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8")[:300_000], add_special=False)
        for n in _SHARES:
            for i in range(len(ids) - n + 1):
                counts[tuple(ids[i : i + n - 1])][ids[i + n - 1]] += 1

    def following(ids: Sequence[int]) -> dict[int, float]:
        found: dict[int, float] = defaultdict(float)
        for n, share in _SHARES.items():
            context = counts.get(tuple(ids[len(ids) - n + 1 :]))
            if context:
                total = sum(context.values())
                for token, count in context.items():
                    found[token] += share * count / total
        return found

    return following


def as_floats(name: str, folder: Path) -> Path:
    """Write a model with its weights as F32, which the reference runtime reads, to a folder; return the file."""
    source = resolve(name, ResolveOptions(offline=True))
    gguf, path = read_gguf(source), folder / "floats.gguf"

    def pieces(tensor: Any) -> Iterator[bytes]:
        rows = b"".join(file_pieces(source, tensor.offset, tensor.n_bytes))
        n_rows = math.prod(tensor.shape[1:])
        yield dequantize(tensor.type, np.frombuffer(rows, np.uint8).reshape(n_rows, -1)).astype("<f4").tobytes()

    tensors = [
        OutTensor(tensor.name, tensor.shape, GGMLType.F32, partial(pieces, tensor)) for tensor in gguf.tensors.values()
    ]
    write_gguf(path, read_entries(gguf), tensors)
    return path


def superposed(
    model: Any, tokenizer: Tokenizer, prompt_ids: list[int], k: int, n_tokens: int, following: NextTokens | None
) -> list[tuple[int, ...]]:
    """Return k continuations, written with a row a token."""
    weights = model.handle
    cache = KVCache.empty(weights.hyper, len(prompt_ids) + n_tokens, np.dtype(np.float32))
    state = None
    for i, token in enumerate(embeddings(weights, np.array(prompt_ids, np.int32))):
        state = evaluate(weights, cache, token, Row(np.arange(i + 1))).state
    drafts: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for step in range(n_tokens):
        assert state is not None
        law = log_softmax(logits(weights, state))
        law[[i for i in np.argsort(-law)[:100] if tokenizer.is_end(int(i))]] = -np.inf
        found: dict[tuple[int, ...], float] = {}
        for ids, logprob in drafts:
            mixed = law
            seen = {} if following is None or not step else following([*prompt_ids, *ids])
            if seen:
                known = np.full(len(law), -12.0)
                known[list(seen)] = np.log(list(seen.values()))
                mixed = (1 - _ALPHA) * law + _ALPHA * known
            for token in np.argsort(-mixed)[:_EXTENSIONS].tolist():
                found[(*ids, token)] = logprob + float(mixed[token])
        drafts = sorted(found.items(), key=lambda each: -each[1])[:k]
        shares = np.exp(np.array([logprob for _, logprob in drafts]) - drafts[0][1])
        latest = embeddings(weights, np.array([ids[-1] for ids, _ in drafts], np.int32))
        mix = (shares / shares.sum()).astype(np.float32) @ latest
        if step < n_tokens - 1:
            state = evaluate(weights, cache, mix, Row(np.arange(len(prompt_ids) + step + 1))).state
    return [ids for ids, _ in drafts]


def logprobs(engine: edgedec.Engine, prompt_ids: list[int], ids: tuple[int, ...]) -> float:
    """Return the model's own mean log-probability of a token of a continuation."""
    session = engine.session(256)
    rows = session.forward(np.array([*prompt_ids, *ids], np.int32), n_past=0, rows="all").logits
    session.close()
    start = len(prompt_ids) - 1
    return mean(float(log_softmax(rows[start + i])[token]) for i, token in enumerate(ids))


def quality(name: str, folder: Path | None, k: int, n_tokens: int) -> dict[str, Any]:
    """Return by way the mean log-probabilities of a token, of the best and of all continuations."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with (
        TemporaryDirectory() as made,
        edgedec.load(as_floats(name, Path(made)), runtime="reference", draft="off", n_ctx=128) as oracle,
        edgedec.load(name, runtime="cpu", draft="off", offline=True) as engine,
    ):
        following = ngrams_of(engine.tokenizer, folder)
        for prompt in track(PROMPTS, "prompts", console=Console(stderr=True)):
            ids = list(engine.prompt_ids(prompt))
            ways = {
                "superposed": superposed(oracle.model, engine.tokenizer, ids, k, n_tokens, None),
                "superposed, n-grams": superposed(oracle.model, engine.tokenizer, ids, k, n_tokens, following),
                "greedy": [engine.generate(ids, temperature=0, max_tokens=n_tokens, ignore_end=True).token_ids],
            }
            with engine.partial_texts(ids, max_tokens=n_tokens) as texts:
                ways["forks"] = [each.text.token_ids for each in beam_search(texts, k)]
            drawn = engine.samples(ids, k, temperature=0.8, seed=1, max_tokens=n_tokens, ignore_end=True)
            ways["samples"] = [each.token_ids for each in drawn]
            for way, written in ways.items():
                scores = [logprobs(engine, ids, each) for each in written]
                found[way].append((max(scores), mean(scores)))
    return {
        way: {"best": round(mean(b for b, _ in each), 3), "all": round(mean(a for _, a in each), 3)}
        for way, each in found.items()
    }


def times(name: str, k: int) -> dict[str, float]:
    """Return the median milliseconds of a forward of one branch, and of one of k branches."""
    with edgedec.load(name, runtime="cpu", draft="off", offline=True) as engine, engine.branches(PROMPTS[0]) as texts:
        names = [texts.root, *texts.fork(texts.root, k - 1)]
        found: dict[int, list[float]] = {1: [], k: []}
        for step in range(40):
            for n, seconds in found.items():
                began = perf_counter()
                texts.forward({branch: [100 + step] for branch in names[:n]})
                seconds.append(perf_counter() - began)
    return {f"{n}": round(1000 * median(seconds), 2) for n, seconds in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="whose continuations are scored; it runs on the reference runtime, too")
    parser.add_argument("--ngrams", type=Path, help="a folder with .md and .txt files")
    parser.add_argument("--timed", help="a model whose forwards are timed")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--n-tokens", type=int, default=10)
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "superposed", "model": args.model, "k": args.k, "n_tokens": args.n_tokens}
    if args.model:
        line |= {"results": quality(args.model, args.ngrams, args.k, args.n_tokens)}
    if args.timed:
        line |= {"timed": args.timed, "forward_ms": [times(args.timed, args.k) for _ in range(3)]}
    text = json.dumps(line | provenance())
    print(text)
    if args.json_out is not None:
        args.json_out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
