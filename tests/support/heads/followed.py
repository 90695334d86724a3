"""Tiny models on the cpu runtime that a draft head of any kind follows, and what the head makes of their texts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.head_state import ChainRules, DraftCall, DraftedChain, HeadState
from edgedec.load_options import LoadOptions
from edgedec.model import Model, Session
from edgedec_runtimes.cpu.runtime import Cpu
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT, loaded, of_floats, of_integers
from support.heads.tiny_assistant import FLOATS as GEMMA
from support.heads.tiny_assistant import INTEGERS as GEMMA_INTEGERS
from support.heads.tiny_assistant import OF_FLOATS, OF_INTEGERS, write_assistant
from support.heads.tiny_blocks import tiny_block
from support.heads.tiny_heads import TinyHead, write_head
from support.heads.tiny_nextn import OWN, write_nextn
from support.heads.tiny_rows import write_exit
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

_SHARED: dict[str, Any] = {"taps": (2, 3, 4), "n_vocab_target": N_VOCAB}
TRAINED_FLOATS = TinyHead(n_embd=48, n_embd_target=48, n_ff=80, n_head=3, n_head_kv=1, head_dim=16, **_SHARED)
TRAINED_INTEGERS = TinyHead(n_embd=256, n_embd_target=256, n_ff=128, n_head=4, n_head_kv=2, head_dim=64, **_SHARED)
NORMED = replace(TRAINED_INTEGERS, fc_norm="each", feeds_back_normed=True, speculators=True)
NEXTN_FLOATS = Tiny("qwen3", n_layer=3, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
NEXTN_INTEGERS = Tiny("qwen3", n_layer=2, tied=True, types=("Q8_0",), seed=1)
EXPERTS = Tiny(
    "qwen3moe", n_layer=2, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_expert=8, n_expert_used=3, n_ff_expert=32
)
VANILLA = {"markov": "vanilla", "rank": 6}
SELECTOR = {"markov": "selector", "rank": 6, "top_k": 7, "shifted": False}
BLOCK_FLOATS = tiny_block(of_floats({**VANILLA, "n_layer": 2}))
RNN = tiny_block(of_integers({"markov": "rnn", "rank": 32, "n_layer": 2, "size": 6, "confidence": True}))
GATED = tiny_block(of_integers({"markov": "gated", "rank": 32, "causal": True, "shifted": False}))
DFLASH2 = tiny_block(
    of_integers({**SELECTOR, "rank": 32, "n_layer": 2, "size": 6, "top_k": 9, "conv_length": 2, "conv_group": 16})
)


@contextmanager
def trained(folder: Path, tiny: Tiny = FLOATS, head: TinyHead = TRAINED_FLOATS) -> Iterator[Model]:
    """Load a tiny model that a trained head follows."""
    write_head(folder / "head", head)
    path = write_tiny(folder / "m.gguf", tiny)
    with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=folder / "head")) as model:
        yield model


@contextmanager
def nextn(folder: Path, tiny: Tiny = NEXTN_FLOATS, own: tuple[str, ...] = OWN[:1], **options: Any) -> Iterator[Model]:
    """Load a tiny model that its nextn layer follows."""
    path = write_nextn(folder / "m.gguf", tiny, own)
    with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=path, **options)) as model:
        yield model


@contextmanager
def exiting(folder: Path, tiny: Tiny = FLOATS) -> Iterator[Model]:
    """Load a tiny model that a head follows whose drafts leave it behind its second layer."""
    path = write_tiny(folder / "m.gguf", tiny)
    head = write_exit(folder / "exit.gguf", path, 2, tiny.n_embd, N_VOCAB)
    with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=head)) as model:
        yield model


@contextmanager
def assisted(folder: Path, tiny: Tiny = GEMMA, head: Tiny = OF_FLOATS, **options: Any) -> Iterator[Model]:
    """Load a tiny gemma4 that an assistant follows, which sees its keys and values."""
    path = write_tiny(folder / "m.gguf", tiny)
    assistant = write_assistant(folder / "assistant.gguf", head, tiny.n_embd)
    with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=assistant, **options)) as model:
        yield model


_KINDS: dict[str, Callable[[Path], AbstractContextManager[Model]]] = {
    "trained": trained,
    "trained, integers": partial(trained, tiny=INTEGERS, head=TRAINED_INTEGERS),
    "trained, normed": partial(trained, tiny=INTEGERS, head=NORMED),
    "nextn": nextn,
    "nextn, integers": partial(nextn, tiny=NEXTN_INTEGERS),
    "nextn, experts": partial(nextn, tiny=EXPERTS),
    "nextn, states": partial(nextn, tiny=replace(ARCHITECTURES["qwen35"], types=("Q8_0",))),
    "assistant": assisted,
    "assistant, integers": partial(assisted, tiny=GEMMA_INTEGERS, head=OF_INTEGERS),
    "exit": exiting,
    "exit, integers": partial(exiting, tiny=INTEGERS),
    "block": partial(loaded, tiny=FLOATS, head=BLOCK_FLOATS),
    "block, rnn": partial(loaded, tiny=INTEGERS, head=RNN),
    "block, gated": partial(loaded, tiny=INTEGERS, head=GATED),
    "block, dflash2": partial(loaded, tiny=INTEGERS, head=DFLASH2),
}
KINDS = tuple(_KINDS)
"""Models and heads of floats, which are no whole blocks of 32, and of integers."""


def followed(kind: str, folder: Path) -> AbstractContextManager[Model]:
    """Load a tiny model with a head of one of KINDS, for 320 tokens."""
    return _KINDS[kind](folder)


def head_of(session: Session) -> HeadState:
    """Return the head that follows a session."""
    assert session.draft_head is not None
    return session.draft_head


def read(session: Session, begin: int, end: int) -> None:
    """Evaluate TEXT[begin:end] behind the first `begin` tokens."""
    session.forward(TEXT[begin:end], n_past=begin)


def scores(session: Session, n: int, most: int = 6) -> NDArray[np.float32]:
    """Return f32[n_drafts, n_listed], the scores after TEXT[: n + 1] and after each drafted token, `most` at most.

    The session holds n tokens.
    """
    head, rows = head_of(session), list[NDArray[np.float32]]()
    row = head.begin(n, int(TEXT[n]))
    while row is not None and len(rows) < most:
        rows.append(row.copy())
        row = head.next(int(head.token_ids[row.argmax()]))
    return np.stack(rows)


def fresh(model: Model, n: int) -> NDArray[np.float32]:
    """Return the scores of a new session that read TEXT[:n] at once."""
    session = model.session(320)
    read(session, 0, n)
    return scores(session, n)


def chain(session: Session, n: int, rules: ChainRules) -> DraftedChain:
    """Return the chain behind TEXT[: n + 1], of which the session holds n tokens."""
    return head_of(session).chain(n, int(TEXT[n]), rules)


def drafted_together(sessions: Sequence[tuple[Session, int]], rules: ChainRules) -> list[DraftedChain]:
    """Return the chains behind texts of which the sessions hold so many tokens of TEXT, drafted in one call."""
    calls: list[DraftCall] = []
    threads = ThreadPoolExecutor(len(sessions))
    all_there = Barrier(len(sessions), action=lambda: calls[0].answer(calls[1:]))

    def joined(call: DraftCall) -> SharedForward:
        calls.append(call)
        all_there.wait(30)
        return SharedForward(0.0, len(calls), len(calls))

    with threads:
        chains = [
            threads.submit(head_of(session).seen_by(joined=joined).chain, n, int(TEXT[n]), rules)
            for session, n in sessions
        ]
        return [future.result(30) for future in chains]
