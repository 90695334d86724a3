"""How many rows have the bits of single steps: what the probe finds of models that differ in known ways."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from edgedec.model import Forward, Model
from edgedec.model_card import Capabilities
from edgedec.sessions.cost_probe import measuring_s
from edgedec_runtimes.shared.invariance import RANGE_TOKENS, MeasuredRows, measured_invariance

N_VOCAB = 7
Logits = Callable[[list[int], int, set[int]], float]
"""From the text up to a row, the rows of its forward and what other tokens its cells have held, to the row's logits."""


class Session:
    """Logits as a function says; cells remember what they held."""

    def __init__(self, logits: Logits) -> None:
        self._logits = logits
        self._cells: list[list[int]] = []

        self.n_ctx = 10_000
        self.n_forwards = 0

    def forward(self, tokens: NDArray[np.int32], *, n_past: int, rows: str = "last") -> Forward:
        """Evaluate tokens from n_past on."""
        self.n_forwards += 1
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
    card = SimpleNamespace(n_vocab=1000, fingerprint="f", adapters=())
    capabilities = Capabilities(max_rows=max_rows, rollback=rollback)
    bare = SimpleNamespace(encode=lambda text, add_special=True: [1])  # which adds nothing to a text
    model = SimpleNamespace(card=card, capabilities=capabilities, session=lambda n_ctx: Session(logits), tokenizer=bare)
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


def test_a_device_whose_steps_take_seconds_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two rows count as equal, and that is not kept: the next load tries again."""
    with monkeypatch.context() as patch:
        patch.setattr("edgedec_runtimes.shared.invariance.SLOWEST_STEP_S", -1.0)
        assert invariance(of_the_text, tmp_path) == 1
    assert invariance(of_the_text, tmp_path) == 16


class Ranged:
    """A model whose rows have the bits of single steps up to a number that depends on the range of the context."""

    def __init__(self, exact: list[int], cache_dir: Path | None = None) -> None:
        def logits(text: list[int], n_rows: int, left: set[int]) -> float:
            place = min((len(text) - 1) // RANGE_TOKENS, len(exact) - 1)
            return of_the_text(text, 0, left) + (n_rows > exact[place])

        self.exact = exact
        self.card = SimpleNamespace(n_vocab=1000, fingerprint="f", adapters=())
        self.capabilities = Capabilities(max_rows=64)
        self.batch_invariant = exact[0]
        self.session = Session(logits)
        self.rows = MeasuredRows(cast(Model, self), cache_dir)

    def at(self, n_past: int) -> MeasuredRows:
        """Let the session hold a text of that length."""
        if len(self.session._cells) < n_past:
            self.session.forward(np.arange(n_past, dtype=np.int32), n_past=0)
        self.session.n_forwards = 0
        return self.rows

    def holds(self, n_past: int, n_rows: int) -> bool:
        """Ask of rows after a text of that length."""
        return self.at(n_past).at(cast(Any, self.session), n_past, n_rows).sure >= n_rows

    def possible(self, n_past: int) -> int | None:
        """Return how many rows after a text of that length may be exact; evaluates nothing."""
        return self.rows.at(cast(Any, self.session), n_past).possible


def test_short_contexts_have_what_the_model_says() -> None:
    """And nothing is measured there."""
    model = Ranged([5])
    assert [model.holds(100, n) for n in (1, 2, 5, 6)] == [True, True, True, False]
    assert model.session.n_forwards == 0
    assert model.possible(100) == 5


def test_a_range_is_measured_before_rows_are_used_in_it() -> None:
    """Once, and as far as was asked for; a single step needs no measuring."""
    model = Ranged([16, 4])
    assert model.holds(300, 1)
    assert model.session.n_forwards == 0
    assert model.holds(300, 3)
    assert model.session.n_forwards > 0
    assert model.holds(310, 4)
    assert model.session.n_forwards == 0
    assert not model.holds(320, 5)  # eight are tried
    assert model.possible(320) == 4
    assert not model.holds(330, 5)
    assert model.session.n_forwards == 0


@pytest.mark.parametrize("n_rows", [2, 3, 5, 8, 11, 16])
def test_what_measuring_will_take_is_known_before(n_rows: int) -> None:
    """Each forward counts once; without leave to measure there is none, and nothing is found."""
    model = Ranged([16, 16])
    assert model.at(300).at(cast(Any, model.session), 300).sure < n_rows
    assert model.session.n_forwards == 0
    assert model.holds(300, n_rows)
    assert model.session.n_forwards == measuring_s(n_rows, lambda n_nodes: 1.0)
    assert model.at(300).at(cast(Any, model.session), 300).sure >= n_rows


def test_what_was_proven_and_is_disproven_later_is_used_no_more() -> None:
    """Rounding may have hidden a difference: a larger draft that is measured tries the smaller ones again."""
    model = Ranged([16, 4])
    assert model.holds(300, 4)
    model.exact[1] = 1
    assert not model.holds(320, 5)
    assert model.possible(330) is None


@pytest.mark.slow
@pytest.mark.parametrize("n_past", [256, 300, 511, 512, 5000])
def test_where_rows_differ_they_are_not_used_in_longer_contexts_either(n_past: int) -> None:
    """Nothing is measured there any more; a shorter context keeps what it has."""
    model = Ranged([16, 1, 16])
    assert not model.holds(256, 2)
    assert model.possible(n_past) is None
    assert not model.holds(n_past, 2)
    assert model.session.n_forwards == 0
    assert model.holds(200, 16)


def test_rows_stay_in_their_range() -> None:
    """A row behind the border would be another kernel's in a single step than the rows before it."""
    model = Ranged([16, 16])
    assert [model.possible(n) for n in (0, 240, 250, 255, 256)] == [16, 16, 6, 1, 16]
    assert [model.holds(250, n) for n in (6, 7)] == [True, False]


def test_too_near_to_the_end_of_a_range_or_a_session_nothing_is_measured() -> None:
    """Rows are not used there, and the range stays unknown."""
    model = Ranged([16, 16])
    assert not model.holds(505, 2)
    model.session.n_ctx = 305
    assert not model.holds(300, 2)
    assert model.session.n_forwards == 0
    assert model.possible(300) == 16


def test_what_was_found_of_a_range_is_kept(tmp_path: Path) -> None:
    """The next load measures nothing, another model everything."""
    assert Ranged([16, 3], tmp_path).holds(300, 3)
    assert not Ranged([16, 1], tmp_path / "other").holds(300, 3)
    again = Ranged([16, 3], tmp_path)
    assert again.holds(300, 3)
    assert again.session.n_forwards == 0
    assert Ranged([16, 16], tmp_path / "other").possible(300) is None


@pytest.mark.parametrize(
    "text", ["[]", '{"1": 2}', '{"x": [1, 2]}', '{"1": [3, 2]}', '{"1": [0, 2]}', '{"1": [true, 2]}']
)
def test_damaged_answers_are_none(tmp_path: Path, text: str) -> None:
    """The range is measured again."""
    Ranged([16, 3], tmp_path).holds(300, 3)
    (file,) = (tmp_path / "probes").iterdir()
    file.write_text(text)
    model = Ranged([16, 3], tmp_path)
    assert model.holds(300, 3)
    assert model.session.n_forwards > 0
