"""Time drafts of random heads that draft blocks, and of random EAGLE-3 heads, by the sizes of a target.

    python benchmarks/heads/block_runtime.py [135m | 0.5b | 1.5b] ...

A line is a kind of head and a list: the least and the median milliseconds of drafts of some tokens behind the four rows
that a step has left, of all kinds in turn. Before each draft, the processor's caches are filled with something else, as
a step of the target does. No model is loaded: the heads have embeddings and output rows of their own, and the text is
random. Random heads draft rubbish, and take the time that trained ones take.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType
from edgedec.head_state import ChainRules
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec_runtimes.cpu.draft_head.beside import Borrowed, HeadBeside, TextBeside
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.shapes import expected_shapes
from edgedec_runtimes.trained_heads.target import Fitted

N_TOKENS = 320  # of the text
N_ROUNDS = 30
N_NEW = 4  # rows between two drafts
N_VOCAB = 32768
RANK = 128
SIZES = {"135m": (576, 9, 3, 64), "0.5b": (896, 14, 2, 64), "1.5b": (1536, 12, 2, 128)}
LISTS = (3072, 9216, 24576)
LENGTHS = (4, 7)
_EIGHT_BITS = (
    *("fc", "embedding", "markov_w1", "attention_conv_proj", "mlp_conv_proj"),
    *("selector_predecessor", "selector_successor", "selector_hidden"),
)
_OTHER = np.zeros(64 << 20, np.uint8)  # more than caches hold


@dataclass(frozen=True, slots=True)
class Way:
    """A kind of head that is timed: its name, its card, and how many tokens are drafted."""

    name: str
    card: HeadCard
    lengths: tuple[int, ...]


def main(names: list[str]) -> None:
    """Print the table."""
    for name in names or list(SIZES):
        for n_list in LISTS:
            ways = list(ways_of(name, n_list))
            heads = [beside(way.card) for way in ways]
            times = timed(ways, heads)
            for way, taken in zip(ways, times, strict=True):
                found = ", ".join(
                    f"{n} tokens {min(of) * 1000:.2f} ({median(of) * 1000:.2f}) ms" for n, of in taken.items()
                )
                print(f"{name}, list of {n_list}, {way.name}: {found}", flush=True)
            for head in heads:
                head.close()


def ways_of(name: str, n_list: int) -> Iterator[Way]:
    """Yield the kinds of heads for a target of these sizes."""
    n_embd, n_head, n_head_kv, head_dim = SIZES[name]
    card = HeadCard(
        *("random", n_embd, n_embd, 2 * n_embd, n_head, n_head_kv, head_dim, 1e-6, 1e4, (1, 2, 3), n_list, N_VOCAB),
        own_embedding=True,
        own_output=True,
    )
    yield Way("EAGLE-3", card, LENGTHS)
    for n_layer in (1, 2):
        for size in (4, 8):
            shape = BlockShape(n_layer, size, shifted=True, markov="vanilla", rank=RANK)
            lengths = tuple(n for n in (*LENGTHS, 8) if n <= size)
            yield Way(f"{n_layer} layers, {size} rows", replace(card, taps=(1, 2, 3, 4, 5), block=shape), lengths)
    shape = BlockShape(2, 8, shifted=False, markov="selector", rank=256, top_k=16, conv_length=2, conv_group=16)
    yield Way("DFlash2, 2 layers, 8 rows", replace(card, taps=(1, 2, 3, 4, 5), block=shape), LENGTHS)


def beside(card: HeadCard) -> HeadBeside:
    """Return a head of random weights, in Q4_0, and Q8_0 where the runtime keeps that."""
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in expected_shapes(card, n_taps=len(card.taps)).items():
        if len(shape) == 1 or shape[1] % 32:
            tensors[name] = HeadTensor.of(np.ones(shape, np.float32))
            continue
        type = GGMLType.Q8_0 if name.rpartition(".")[2] in _EIGHT_BITS else GGMLType.Q4_0
        blocks = rng.integers(0, 256, (shape[0] * shape[1] // 32, type.block_bytes), np.uint8)
        blocks[:, :2] = np.array([0.3 / 8 / np.sqrt(shape[1])], np.float16).view(np.uint8)
        tensors[name] = HeadTensor(shape, type, blocks.reshape(-1))
    head = Head(card, tensors, np.arange(card.n_vocab_draft, dtype=np.int32))
    target = Borrowed(N_VOCAB, card.n_embd, 6, 1.0, _none, _none, 1, lambda: None)
    return HeadBeside(Fitted(head, ()), target, os.cpu_count() or 1)


def _none(ids: object) -> NoReturn:
    raise AssertionError(f"the heads have rows {ids} of their own")


def timed(ways: list[Way], heads: list[HeadBeside]) -> list[dict[int, list[float]]]:
    """Return the seconds of drafts of each length, of all ways in turn."""
    rng = np.random.default_rng(2)
    texts = [head.text(N_TOKENS + 64) for head in heads]
    ids = rng.integers(0, N_VOCAB, N_TOKENS + 1, dtype=np.int32)
    states = rng.standard_normal((5, N_TOKENS, ways[0].card.n_embd), np.float32)
    found: list[dict[int, list[float]]] = [{n: [] for n in way.lengths} for way in ways]
    for n_past in range(N_TOKENS - N_NEW * N_ROUNDS, N_TOKENS, N_NEW):
        for way, text, of in zip(ways, texts, found, strict=True):
            assert text is not None
            for length in way.lengths:
                of[length].append(_draft(way, text, n_past, ids, states, length))
    for text in texts:
        assert text is not None
        text.close()
    return found


def _draft(
    way: Way, text: TextBeside, n_past: int, ids: NDArray[np.int32], states: NDArray[np.float32], length: int
) -> float:
    """Return the seconds of a draft behind rows that were taken just before, of which N_NEW are not read."""
    state, taps = text.state(nullcontext, NUMPY_ROW_OPS), len(way.card.taps)
    first = N_TOKENS - N_NEW * N_ROUNDS - N_NEW
    if n_past == first + N_NEW:
        text.take(0, ids[:first], states[:taps, :first], n_wanted=1, is_tree=False)
    begin = n_past - N_NEW
    text.take(begin, ids[begin:n_past], states[:taps, begin:n_past], n_wanted=N_NEW, is_tree=False)
    np.bitwise_xor(_OTHER, 1, out=_OTHER)
    begun = perf_counter()
    chain = state.chain(n_past, int(ids[n_past]), ChainRules(length))
    seconds = perf_counter() - begun
    assert len(chain.tokens) == length
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
