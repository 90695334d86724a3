"""Forks in one forward attend to the pages that they share together, and every row has the bits that it has alone."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny
from support.models.tiny_runs import Bits, Tokens, bits

from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Session, Span
from edgedec_runtimes.cpu.library import instruction_sets, native
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.session import CpuSession

# Windows that begin among the shared tokens, sinks, biases, a soft cap, layers that read the keys of others.
CASES = {
    "llama": ("q8_0", ARCHITECTURES["llama"]),
    "llama-packed": ("gear", ARCHITECTURES["llama3"]),
    "windows": ("q4_0", replace(ARCHITECTURES["gemma3"], sliding_window=300)),
    "sinks": ("q8_0", ARCHITECTURES["gpt-oss"]),
    "biases": ("gear", ARCHITECTURES["qwen2"]),
    "soft-cap": ("q4_0", replace(ARCHITECTURES["gemma2"], sliding_window=500)),
    "shared keys": ("gear", replace(ARCHITECTURES["gemma4"], sliding_window=300)),
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a test evaluates on one session."""

    session: Session
    n_past: int
    tokens: Tokens
    parents: Tokens | None = None

    def item(self) -> ForwardItem:
        """Return them for a forward, all rows of logits wanted."""
        return ForwardItem(self.session, self.n_past, (RowGroup(self.tokens, sees=self.parents),), rows="all")

    def alone(self) -> Bits:
        """Return the logits' bits of a forward over these rows alone, on a fork."""
        fork = self.session.fork()
        found = fork.forward(self.tokens, n_past=self.n_past, parents=self.parents, rows="all")
        fork.close()
        return bits(found.logits)


def text(n: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(4, 260, n).astype(np.int32)


def load(path: Path, kv_type: str, n_threads: int, n_ctx: int = 900) -> Model:
    return Cpu().load(path, LoadOptions(n_ctx=n_ctx, n_parallel=12, n_threads=n_threads, kv_type=kv_type))


def family(model: Model, n: int = 400) -> list[Rows]:
    """Return rows of forks, of forks of forks, of a fork that went back, and of a session of its own.

    They share about n tokens: those of `second` 300 more, and the one that went back 140 fewer.
    """
    tree = np.array([-1, 0, 0, 1, -1, 4], np.int32)
    first, stranger = model.session(n + 500), model.session(n + 500)
    first.forward(text(n, 1), n_past=0)
    stranger.forward(text(n + 10, 1), n_past=0)  # the same text in pages of its own
    second, third, back, last = (first.fork() for _ in range(4))
    second.forward(text(300, 2), n_past=n)
    fourth, fifth = second.fork(), second.fork()
    fifth.forward(text(70, 3), n_past=n + 300)
    back.forward(text(3, 4), n_past=n - 140)
    return [
        Rows(first, n, text(1, 5)),
        Rows(fourth, n + 300, text(6, 6), tree),
        Rows(stranger, n + 10, text(2, 7)),
        Rows(third, n, text(5, 8)),
        Rows(second, n + 300, text(1, 9)),
        Rows(back, n - 137, text(6, 10), tree),
        Rows(fifth, n + 370, text(2, 11)),
        Rows(last, n, text(1, 12)),
    ]


def check(model: Model, rows: Sequence[Rows]) -> None:
    """Compare a forward over all of the rows with one over each."""
    expected = [each.alone() for each in rows]
    for forward, alone in zip(model.forward([each.item() for each in rows]), expected, strict=True):
        np.testing.assert_array_equal(bits(forward.logits), alone)
    for each in rows:
        if each.parents is not None:
            each.session.keep(np.array([0], np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "shared keys"])
def test_rows_whose_logits_nobody_reads(tmp_path: Path, name: str) -> None:
    """They leave out what stores nothing behind them, and the rows that are read have the same bits."""
    kv_type, tiny = CASES[name]
    with load(write_tiny(tmp_path / "m.gguf", tiny), kv_type, 2) as model:
        rows = family(model)
        expected = [each.alone()[-1:] for each in rows]
        items = [replace(each.item(), rows="last") for each in rows]
        for forward, alone in zip(model.forward(items), expected, strict=True):
            np.testing.assert_array_equal(bits(forward.logits), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "isa"),
    [
        (name, isa)
        for name in CASES
        for isa in (instruction_sets() if name in ("llama", "windows") else instruction_sets()[:1])
    ],
)
def test_forks_together_have_the_bits_of_forks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, isa: str
) -> None:
    """Forks of forks, trees, windows and sinks, on one thread and on two; then each goes on alone."""
    kv_type, tiny = CASES[name]
    path = write_tiny(tmp_path / "m.gguf", tiny)
    monkeypatch.setenv("EDGEDEC_CPU_ISA", isa)
    found: list[list[Bits]] = []
    for n_threads in (1, 2):
        with load(path, kv_type, n_threads) as model:
            rows = family(model)
            check(model, rows)
            check(model, rows[::-2])
            found.append([each.alone() for each in rows])
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_layers_that_some_rows_skip(tmp_path: Path) -> None:
    """Forks of which some skip the attention of a layer, and forks of which few rows are wanted, have their bits."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(n_layer=3))
    with load(path, "q8_0", 2) as model:
        rows = [each for each in family(model) if each.parents is None]

        def some(i: int) -> LayerSet:
            return LayerSet(np.array([i % 2 == 0, True, i % 3 > 0]), np.array([True] * 3))

        items = [
            replace(each.item(), groups=(RowGroup(each.tokens, span=Span(layers=some(i))),), rows="last")
            for i, each in enumerate(rows)
        ]
        alone = []
        for item in items:
            fork = item.session.fork()
            alone.append(bits(model.forward([replace(item, session=fork)])[0].logits))
        for forward, expected in zip(model.forward(items), alone, strict=True):
            np.testing.assert_array_equal(bits(forward.logits), expected)


@pytest.mark.slow
def test_a_prefix_of_halves(tmp_path: Path) -> None:
    """Forks share keys and values of 16 bits from 4,096 tokens on."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(n_layer=1, n_head=2, n_head_kv=1))
    with load(path, "f16", 2, 5000) as model:
        check(model, family(model, 4400))


def test_a_fork_frees_what_a_longer_text_has_left(tmp_path: Path) -> None:
    """A session that went back to a short text keeps none of the long one's pages once it is forked."""

    def holds(n_tokens: int) -> bool:
        handle = ctypes.c_void_p()
        code = native().ec_session_fork(session.handle, n_tokens, ctypes.byref(handle))
        if not code:
            native().ec_session_close(handle)
        return bool(code == 0)

    path = write_tiny(tmp_path / "m.gguf", Tiny(n_layer=1))
    with load(path, "f16", 2) as model:
        session = cast(CpuSession, model.session(900))
        session.forward(text(800, 1), n_past=0)
        session.forward(text(1, 2), n_past=99)
        before = bits(session.forward(text(1, 2), n_past=99).logits)
        fork = session.fork()
        assert holds(100)
        assert not holds(129)
        np.testing.assert_array_equal(bits(fork.forward(text(1, 2), n_past=99).logits), before)
        np.testing.assert_array_equal(bits(session.forward(text(1, 2), n_past=99).logits), before)
