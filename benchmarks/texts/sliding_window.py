"""Measure what a sliding context costs: perplexity behind the window, and speed, against a context that suffices.

    python benchmarks/texts/sliding_window.py smollm2-135m --windows 256 512 1024

The perplexity is teacher-forced over a text, at the positions behind the largest window: with the whole text before
them, and with the windows that `edgedec.Lossy(slide=True)` gives them. Then one text is generated twice, and the times
of its tokens are compared. Ends with one line of JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import edgedec
from edgedec.api.options import Lossy
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.model import Model, Session
from edgedec.progress import CancelToken
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.evaluation.evaluate import DEFAULT_TEXT
from edgedec_methods.sliding_window import SlidingSession

_CHUNK = 32


def negative_log_likelihood(session: Session, ids: np.ndarray[Any, np.dtype[np.int32]], first: int) -> float:
    """Return the mean over the tokens from `first` on, each predicted from those before it."""
    total = 0.0
    session.forward(ids[:first], n_past=0)
    for begin in range(first - 1, len(ids) - 1, _CHUNK):
        tokens = ids[begin : min(begin + _CHUNK, len(ids) - 1)]
        logits = session.forward(tokens, n_past=begin, rows="all").logits.astype(np.float64)
        own = logits[np.arange(len(tokens)), ids[begin + 1 : begin + 1 + len(tokens)]]
        top = logits.max(axis=1)
        total += float((top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - own).sum())
    return total / (len(ids) - first)


def quality(model: Model, ids: np.ndarray[Any, np.dtype[np.int32]], windows: list[int]) -> dict[str, float]:
    """Return the perplexity with all of the text, and for each window."""
    first, found = max(windows), {}
    for name, n_ctx in [("all", len(ids)), *((str(window), window) for window in sorted(windows))]:
        session = model.session(n_ctx)
        try:
            reader = session if name == "all" else SlidingSession(session)
            found[name] = float(np.exp(negative_log_likelihood(reader, ids, first)))
        finally:
            session.close()
        print(f"window {name:>5}: perplexity {found[name]:.3f} over {len(ids) - first} tokens", flush=True)
    return found


def speed(name: str, window: int, n_tokens: int) -> dict[str, float]:
    """Return tokens per second after the first one, in turn, of a context that slides and of one that suffices."""
    seconds: dict[str, float] = {"all": 0.0, str(window): 0.0}
    for turn in range(2):
        for key, n_ctx in [("all", n_tokens + 64), (str(window), window)][:: 1 - 2 * turn]:
            with edgedec.load(
                name, runtime="cpu", offline=True, n_ctx=n_ctx, lossy=Lossy(slide=key != "all"), draft="off"
            ) as engine:
                stats = engine.generate("Once upon a time", max_tokens=n_tokens, ignore_end=True, temperature=0.7).stats
                seconds[key] += stats.total_s - stats.first_token_s
    return {key: 2 * (n_tokens - 1) / total for key, total in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT)
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, and generated")
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), True, None, CancelToken()))
    options = LoadOptions(n_ctx=args.tokens, max_rows=_CHUNK, cache_dir=cache_folder())
    with choose_runtime(path, "cpu", options).runtime.load(path, options) as model:
        text = args.text.read_text(encoding="utf-8")
        ids = np.array(model.tokenizer.encode(text)[: args.tokens], np.int32)
        found = quality(model, ids, args.windows)
    rates = speed(args.model, args.windows[0], args.tokens)
    print("tokens/s: " + ", ".join(f"{rate:.1f} with {key}" for key, rate in rates.items()))
    figures = {"model": args.model, "tokens": len(ids), "perplexity": found, "tok_s": rates}
    print(json.dumps({"benchmark": "sliding_window", **figures, **provenance()}))


if __name__ == "__main__":
    main()
