"""The curve measured at load: within its time, remembered, and never in the way of loading."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.simulation import Clock

from edgedec.cost_curve import CostCurve
from edgedec.errors import CancelledError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec.model_card import Capabilities
from edgedec.progress import CancelToken
from edgedec.sessions.cost_probe import cost_curve
from edgedec.storage import probe_cache


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of measuring."""
    fake = Clock()
    monkeypatch.setattr("edgedec.sessions.cost_probe.perf_counter", fake)
    monkeypatch.setattr("edgedec.sessions.cost_probe.monotonic", fake)
    monkeypatch.setattr(probe_cache, "_waited_s", lambda: 0.0)  # though other tests may keep the machine busy
    return fake


class Timed:
    """A session whose forwards take what a function of their number and rows says."""

    def __init__(
        self, clock: Clock, seconds: Callable[[int, int], float], n_ctx: int = 512, max_rows: int = 16
    ) -> None:
        card = SimpleNamespace(n_vocab=50, fingerprint="f", runtime="fake")
        bare = SimpleNamespace(encode=lambda text, add_special=True: [1])  # which adds nothing to a text
        self.model = SimpleNamespace(card=card, capabilities=Capabilities(max_rows=max_rows), tokenizer=bare)
        self.n_ctx = n_ctx
        self.calls: list[int] = []
        self._clock = clock
        self._seconds = seconds

    def room(self, n_tokens: int) -> int:
        """Say how many rows fit."""
        return self.n_ctx - n_tokens

    def forward(self, tokens: NDArray[np.int32], *, n_past: int, rows: str = "last") -> None:
        """Let the time pass."""
        assert len(tokens) >= 1
        assert n_past + len(tokens) <= self.n_ctx
        assert 0 <= tokens.min() <= tokens.max() < 50
        self._clock.now += self._seconds(len(self.calls), len(tokens))
        self.calls.append(len(tokens))


def curve_of(session: Timed, cache_dir: Path | None = None, **options: object) -> CostCurve:
    """Measure."""
    return cost_curve(cast(Session, session), LoadOptions(cache_dir=cache_dir, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("begin", range(2, 16))
def test_a_busy_moment_spoils_nothing(clock: Clock, begin: int) -> None:
    """Rows double, then some between; those of one n are apart, so that four slow ones leave each two good times."""
    curve = curve_of(Timed(clock, lambda call, n: 0.001 * n * (5 if begin <= call < begin + 4 else 1), max_rows=11))
    assert curve.table() == pytest.approx({n: 0.001 * n for n in (1, 2, 3, 4, 6, 8, 11)})


def test_many_rows_make_no_draft_dear(clock: Clock) -> None:
    """After many rows a forward takes longer where weights fit in a cache; after a draft of a few it does not."""
    session = Timed(clock, lambda call, n: 0.001 * (n + 2 * (session.calls[-1:] > [15])))
    assert curve_of(session).resuming.share == 0


@pytest.mark.parametrize("token_s", [0.001, 0.05, 0.2, 0.33, 0.5])
def test_two_seconds_are_enough(clock: Clock, token_s: float) -> None:
    """A slow machine measures fewer n, but more than one: of one alone no draft would ever be tried."""
    curve = curve_of(Timed(clock, lambda call, n: token_s * (1 + 0.02 * (n - 1))))
    assert clock.now <= 2.25 + token_s
    assert len(curve.table()) > 1


def test_what_was_measured_is_remembered(clock: Clock, tmp_path: Path) -> None:
    """The second load evaluates nothing; another number of threads, or option of the runtime, is another key."""
    first = curve_of(Timed(clock, lambda call, n: 0.001 * n), tmp_path)
    session = Timed(clock, lambda call, n: 1.0)
    assert curve_of(session, tmp_path).table() == first.table()
    assert session.calls == []
    curve_of(session, tmp_path, n_threads=7)
    assert session.calls
    other = Timed(clock, lambda call, n: 1.0)
    curve_of(other, tmp_path, runtime_options={"prefetch": "off"})
    assert other.calls


def test_nothing_is_remembered_of_a_busy_machine(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve of this start is what was measured, of a few rows; the next start measures again."""
    counts = iter(range(0, 1 << 20, 1000))
    monkeypatch.setattr(probe_cache, "_waited_s", lambda: next(counts))
    for _ in range(2):
        session = Timed(clock, lambda call, n: 0.001 * n)
        assert list(curve_of(session, tmp_path).table()) == [1, 2, 4, 8]
        assert len(session.calls) < 20


def test_one_n_alone_is_not_remembered(clock: Clock, tmp_path: Path) -> None:
    """Where each forward takes longer than there is time, the next load measures again.

    The first forward may take minutes: somebody has to read the weights from a cold disk, and a server lives long after
    it. A forward may also take less than the clock can tell.
    """
    assert set(curve_of(Timed(clock, lambda call, n: 3.0), tmp_path).table()) == {1}
    assert len(curve_of(Timed(clock, lambda call, n: 60.0 if call == 0 else 0.01), tmp_path).table()) == 8
    assert curve_of(Timed(clock, lambda call, n: 0.0)).resuming.share == 0


DAMAGED = ["", "[]", "null", "{}", '{"1": -1}', '{"1": NaN}', '{"x": 1}', '{"0": 1}', '{"1": null}', "[" * 100_000]
DAMAGED += ['{"resume": -1, "1": 1}', '{"resume": NaN, "1": 1}', '{"resume": [], "1": 1}']


@pytest.mark.parametrize("content", [*DAMAGED, '{"1": 1' + "0" * 400 + "}"])
def test_damage_in_the_cache_is_measured_again(clock: Clock, tmp_path: Path, content: str) -> None:
    """Whatever the file holds."""
    curve_of(Timed(clock, lambda call, n: 0.001), tmp_path)
    (file,) = (tmp_path / "probes").iterdir()
    file.write_text(content)
    assert curve_of(Timed(clock, lambda call, n: 0.002), tmp_path).seconds(1) == pytest.approx(0.002)
    assert json.loads(file.read_text())["1"] == pytest.approx(0.002)


def test_a_cache_that_cannot_be_written_does_no_harm(clock: Clock, tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "cache").write_text("")
    probe_cache.put(tmp_path / "cache", "curve", "key", {"1": 1})
    assert probe_cache.get(tmp_path / "cache", "curve", "key") is None
    assert curve_of(Timed(clock, lambda call, n: 0.001), tmp_path / "cache").seconds(1) == pytest.approx(0.001)


@pytest.mark.parametrize(("n_ctx", "max_rows"), [(1, 16), (2, 16), (17, 16), (512, 1)])
def test_small_contexts_are_measured_as_far_as_they_go(clock: Clock, n_ctx: int, max_rows: int) -> None:
    """No forward goes beyond the context, nor beyond the rows that may be asked for."""
    table = curve_of(Timed(clock, lambda call, n: 0.001 * n, n_ctx=n_ctx, max_rows=max_rows)).table()
    assert max(table, default=0) == min(n_ctx - 1, max_rows)


def test_a_session_that_refuses_leaves_what_was_measured(clock: Clock) -> None:
    """A model that can't go back to an n_past, say: the curve has what came before."""

    def seconds(call: int, n: int) -> float:
        if n == 4:
            raise SessionError("no rollback")
        return 0.001 * n

    assert set(curve_of(Timed(clock, seconds)).table()) == {1, 2}


def test_cancelling_the_load_ends_the_measurement(clock: Clock, tmp_path: Path) -> None:
    """And remembers nothing."""
    cancel = CancelToken()

    def seconds(call: int, n: int) -> float:
        if call == 4:
            cancel.cancel()
        return 0.001

    with pytest.raises(CancelledError):
        curve_of(Timed(clock, seconds), tmp_path, cancel=cancel)
    assert list(tmp_path.iterdir()) == []


def test_a_plain_step_after_a_plain_step_is_measured_as_well(clock: Clock, tmp_path: Path) -> None:
    """Where it is replayed and others are launched, both are known: the streak's seconds, and what resuming costs."""

    def seconds(call: int, n: int) -> float:
        replayed = n == 1 and session.calls[-1:] == [1]
        return 0.002 if replayed else 0.003 + 0.0001 * n

    session = Timed(clock, seconds)
    for curve in (curve_of(session, tmp_path), curve_of(session, tmp_path)):  # measured, and remembered
        assert curve.seconds(1) == pytest.approx(0.002)
        assert curve.resuming.share == pytest.approx(0.55)
        assert curve.cost()(3) == pytest.approx(0.0034 + 0.0011)
