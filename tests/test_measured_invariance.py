"""How many rows have the bits of single steps: what the probe finds of models that differ in known ways."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from edgedec.model import Capabilities, Forward, Model
from edgedec_runtimes.invariance import measured_invariance

N_VOCAB = 7
Logits = Callable[[list[int], int, set[int]], float]
"""From the text up to a row, the rows of its forward and what other tokens its cells have held, to the row's logits."""


class Session:
    """Logits as a function says; cells remember what they held."""

    def __init__(self, logits: Logits) -> None:
        self._logits = logits
        self._cells: list[list[int]] = []

    def forward(self, tokens: NDArray[np.int32], *, n_past: int, rows: str = "last") -> Forward:
        """Evaluate tokens from n_past on."""
        for i, token in enumerate(tokens.tolist(), n_past):
            self._cells[i:] = self._cells[i:] or [[]]
            self._cells[i].append(token)
        text = [cell[-1] for cell in self._cells[: n_past + len(tokens)]]
        found = []
        for i in range(n_past, len(text)):
            left = {token for cell in self._cells[: i + 1] for token in cell if token != cell[-1]}
            found.append([self._logits(text[: i + 1], len(tokens), left)] * N_VOCAB)
        return cast(Forward, SimpleNamespace(logits=np.array(found, np.float32)[0 if rows == "all" else -1 :]))

    def close(self) -> None:
        """Nothing is held."""


def invariance(logits: Logits, cache_dir: Path | None = None, *, max_rows: int = 16, rollback: bool = True) -> int:
    """Return what the probe finds."""
    card = SimpleNamespace(n_vocab=1000, fingerprint="f")
    capabilities = Capabilities(max_rows=max_rows, rollback=rollback)
    model = SimpleNamespace(card=card, capabilities=capabilities, session=lambda n_ctx: Session(logits))
    return measured_invariance(cast(Model, model), cache_dir)


def of_the_text(text: list[int], n_rows: int, left: set[int]) -> float:
    """Return logits that depend on nothing else."""
    return float(sum(i * token for i, token in enumerate(text, 1)) % 65_521)


@pytest.mark.parametrize("max_rows", [1, 2, 5, 16, 40])
def test_logits_of_the_text_alone_are_invariant(max_rows: int) -> None:
    """As far as was asked for, and 16 at most."""
    assert invariance(of_the_text, max_rows=max_rows) == min(16, max_rows)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 15])
def test_another_kernel_for_more_rows_ends_it(n: int) -> None:
    """The last bit of a float is enough."""
    assert (
        invariance(
            lambda text, n_rows, left: np.nextafter(
                np.float32(of_the_text(text, 0, left)), np.float32(n_rows > n) * 1e9
            )
        )
        == n
    )


def test_what_a_rejected_draft_leaves_behind_ends_it() -> None:
    """Going back must take everything with it."""
    assert invariance(lambda text, n_rows, left: of_the_text(text, n_rows, left) + len(left)) == 1


def test_a_session_that_cannot_go_back_has_single_steps() -> None:
    """Nothing could be verified there."""
    assert invariance(of_the_text, rollback=False) == 1


def test_it_is_measured_once(tmp_path: Path) -> None:
    """The next load asks the cache."""
    assert invariance(of_the_text, tmp_path) == 16
    assert invariance(lambda text, n_rows, left: float(n_rows), tmp_path) == 16
    assert invariance(lambda text, n_rows, left: float(n_rows), tmp_path / "other") == 1
