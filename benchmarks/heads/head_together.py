"""Time the drafts of a head for several sessions: all of them in one call, and one after another.

    python benchmarks/heads/head_together.py HEAD TARGET.gguf

For 1, 2, 4 and 8 sessions it prints the milliseconds of a drafted token of every session together, of the same tokens
drafted one after another, and of the target's forward over one row of each session. Lowest of several turns.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from edgedec.cost_curve import SharedForward
from edgedec.head_state import ChainRules, DraftCall, HeadState
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.cpu.runtime import Cpu

_COUNTS = (1, 2, 4, 8)
_N_TEXT = 64
_LENGTH = 8
_TURNS = 9


def draft_together(heads: Sequence[HeadState], tokens: Sequence[int]) -> None:
    """Draft a chain behind each text, all in one call."""
    calls: list[DraftCall] = []

    def joined(call: DraftCall) -> SharedForward:
        calls.append(call)
        return SharedForward()

    for head, token in zip(heads, tokens, strict=True):
        head.seen_by(joined=joined).chain(_N_TEXT, token, ChainRules(_LENGTH))
    calls[0].answer(calls[1:])


def draft_apart(heads: Sequence[HeadState], tokens: Sequence[int]) -> None:
    """Draft a chain behind each text, one after another."""
    for head, token in zip(heads, tokens, strict=True):
        head.chain(_N_TEXT, token, ChainRules(_LENGTH))


def lowest_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of several calls."""
    found = []
    for _ in range(_TURNS):
        begun = perf_counter()
        call()
        found.append(perf_counter() - begun)
    return 1000 * min(found)


def main(head_path: str, target_path: str) -> None:
    """Measure and print."""
    options = LoadOptions(n_ctx=256, n_parallel=max(_COUNTS), draft_head=Path(head_path), cache_dir=cache_folder())
    with Cpu().load(Path(target_path), options) as model:
        texts = np.random.default_rng(1).integers(0, model.card.n_vocab, (max(_COUNTS), _N_TEXT + 1), dtype=np.int32)
        sessions = [model.session(256) for _ in texts]
        for session, text in zip(sessions, texts, strict=True):
            session.forward(text[:_N_TEXT], n_past=0)
        for n in _COUNTS:
            heads = [head for session in sessions[:n] if (head := session.draft_head) is not None]
            tokens = texts[:n, _N_TEXT].tolist()
            items = [
                ForwardItem(session, _N_TEXT, text[_N_TEXT:])
                for session, text in zip(sessions[:n], texts, strict=False)
            ]
            together_ms = lowest_ms(partial(draft_together, heads, tokens)) / _LENGTH
            apart_ms = lowest_ms(partial(draft_apart, heads, tokens)) / _LENGTH
            step_ms = lowest_ms(partial(model.forward, items))
            print(
                f"{n} sessions: a drafted token of each takes {together_ms:.2f} ms together, {apart_ms:.2f} ms "
                f"one after another; a row of each takes {step_ms:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
