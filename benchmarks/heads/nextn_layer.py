"""Time what a nextn layer takes: a drafted token beside a plain step, and the layer's part of reading a prompt.

    python benchmarks/heads/nextn_layer.py qwen3.5-0.8b --json-out nextn_layer.json

The models are random, of the sizes of real ones. A drafted token is timed in chains of eight, once with scores of the
first tokens of the vocabulary and once of all. Plain steps, chains and prompts take turns; medians are printed, and
what the bytes of weights let expect of a drafted token.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.heads.tiny_nextn import nextn_metadata, nextn_tensors
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.random_blocks import random_blocks
from support.models.tiny_models import vocabulary
from support.models.tiny_quantized import Tiny

from edgedec.gguf.tensor_types import GGMLType
from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec_apps.bench.provenance import report
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads import nextn
from edgedec_runtimes.trained_heads.listed_tokens import LISTED

N_VOCAB, N_PROMPT, N_CHAIN = 248_320, 256, 8
MODELS = {
    "qwen3.5-0.8b": Tiny(
        "qwen35",
        types=("Q4_K",),
        tied=True,
        n_layer=24,
        n_embd=1024,
        n_head=8,
        head_dim=256,
        n_ff=3584,
        n_rot=64,
        n_ctx_train=4096,
        recurrent=tuple(layer for layer in range(24) if layer % 4 != 3),
        n_state_head=16,
        n_state_key_head=16,
        n_state=128,
    )
}


def write(path: Path, tiny: Tiny) -> Path:
    """Write a model with a nextn layer and a large vocabulary, and return its path."""
    rng = np.random.default_rng(1)
    tensors = nextn_tensors(tiny)
    rows = random_blocks("Q6_K", N_VOCAB, tiny.n_embd, rng, tiny.n_embd**-0.5)
    tensors["token_embd.weight"] = RawTensor(GGMLType.Q6_K, (tiny.n_embd, N_VOCAB), rows)
    return write_gguf(path, nextn_metadata(tiny) | vocabulary(N_VOCAB), tensors)


def measured(name: str, folder: Path, n_threads: int, n_runs: int) -> dict[str, Any]:
    """Return the milliseconds of a model's steps, chains and prompts."""
    path = write(folder / f"{name}.gguf", MODELS[name])
    ids = np.random.default_rng(0).integers(0, 260, N_PROMPT + 1).astype(np.int32)
    times: dict[str, list[float]] = {}
    prices: dict[str, float] = {}
    options = LoadOptions(n_ctx=1024, n_threads=n_threads, cache_dir=folder)
    with ExitStack() as held:
        sessions: dict[str, Session] = {}
        for what, n_listed in (("without", 0), (f"of {LISTED} tokens", LISTED), ("of all tokens", N_VOCAB)):
            with patch.object(nextn, "n_listed", lambda gguf, n_vocab, n=n_listed: n):
                head = path if n_listed else None
                model = held.enter_context(closing(Cpu().load(path, replace(options, draft_head=head))))
            sessions[what] = held.enter_context(closing(model.session(1024)))
        for what, session in sessions.items():
            if session.draft_head is not None:
                prices[what] = session.draft_head.price.level
        for _ in range(n_runs):
            for what, session in sessions.items():
                note(times, f"prompt {what}", partial(session.forward, ids[:-1], n_past=0))
                note(times, "plain step", partial(session.forward, ids[-1:], n_past=N_PROMPT))
                if (head_state := session.draft_head) is not None:
                    note(times, f"chain {what}", partial(head_state.chain, N_PROMPT + 1, 7, ChainRules(N_CHAIN)))
    return {"name": name, "n_threads": n_threads, "price": prices, "ms": {k: median(v) for k, v in times.items()}}


def note(times: dict[str, list[float]], what: str, call: Callable[[], object]) -> None:
    """Call a function and note its milliseconds."""
    began = time.perf_counter()
    call()
    times.setdefault(what, []).append(1000 * (time.perf_counter() - began))


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [measured(name, Path(folder), args.threads, args.runs) for name in args.models]
    for each in found:
        ms = each["ms"]
        print(f"{each['name']}, {each['n_threads']} threads: a plain step takes {ms['plain step']:.1f} ms")
        for what, price in each["price"].items():
            token, prompt = ms[f"chain {what}"] / N_CHAIN, ms[f"prompt {what}"] / ms["prompt without"] - 1
            share = token / ms["plain step"]
            print(
                f"  {what}: a drafted token takes {token:.2f} ms, {share:.1%} of a step (by bytes {price:.1%}); "
                f"a prompt of {N_PROMPT} tokens takes {prompt:+.1%}"
            )
    report({"benchmark": "nextn_layer", "found": found}, args.json_out)


if __name__ == "__main__":
    main()
