"""Compare a draft head on the cpu runtime with drafts that a plain implementation made, and time its tokens.

    python benchmarks/heads/head_runtime.py HEAD TARGET.gguf GOLDEN.npz

GOLDEN.npz is that of head_golden.py. The text is read by the cpu runtime, whose hidden states differ from
the golden ones by its rounding. Printed are the tokens that are drafted alike, the accepted tokens a step, and the time
of a drafted token relative to a plain step of the target; the exit status is 1 where over 3 % fewer tokens a step are
accepted.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.cpu.runtime import Cpu

TOLERANCE = 0.03
_LONG = 9  # tokens of the chains that are timed
_N_TIMED = 10


def main(head_path: str, target_path: str, golden_path: str) -> int:
    """Print the comparison; return the exit status."""
    golden = np.load(golden_path)
    text = np.concatenate([golden["prompt"], golden["answer"]]).astype(np.int32)
    options = LoadOptions(n_ctx=len(text) + _LONG, draft_head=Path(head_path), cache_dir=cache_folder())
    with Cpu().load(Path(target_path), options) as model:
        session = model.session(len(text) + _LONG)
        head = session.draft_head
        assert head is not None, "the options name a head"
        n_read, n_same, accepted, step_s = 0, 0, [], []
        for position, draft in zip(golden["position"].tolist(), golden["draft"], strict=True):
            begun = perf_counter()
            session.forward(text[n_read : position + 1], n_past=n_read)
            step_s.append(perf_counter() - begun)
            n_read = position + 1
            found = head.chain(n_read, int(text[n_read]), ChainRules(len(draft))).tokens
            n_same += sum(a == b for a, b in zip(found, draft.tolist(), strict=False))
            accepted.append(_accepted(found, text[n_read + 1 :].tolist()))
        draft_again = partial(head.chain, n_read, int(text[n_read]), ChainRules(_LONG))
        chains = [_seconds(draft_again) for _ in range(_N_TIMED)]
    mean, given = np.mean(accepted) + 1, np.mean(golden["accepted"]) + 1
    token_s, plain_s = median(chains) / _LONG, median(step_s[1:])
    print(f"drafts: {n_same} of {golden['draft'].size} tokens the same")
    print(f"tokens a step: {mean:.3f}, golden {given:.3f} ({mean / given - 1:+.1%})")
    print(
        f"a drafted token: {1000 * token_s:.2f} ms, {token_s / plain_s:.1%} of a plain step of {1000 * plain_s:.1f} ms"
    )
    return int(mean < (1 - TOLERANCE) * given)


def _seconds(call: Callable[[], object]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun


def _accepted(drafted: tuple[int, ...], text: list[int]) -> int:
    n = 0
    while n < min(len(drafted), len(text)) and drafted[n] == text[n]:
        n += 1
    return n


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
