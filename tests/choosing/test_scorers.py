"""Scorers of others: what they return is checked, and one that raises, hangs or fails gives a clear error."""

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.decoding.table_branches import letters, random_table, table_texts

from edgedec.choosing.command_scorer import CommandScorer
from edgedec.choosing.partial_texts import best_tokens
from edgedec.choosing.scorer import CallerScorer, Scorer, checked_scores
from edgedec.errors import CancelledError, OptionError, PluginError, RequestError
from edgedec.progress import CancelToken

COUNTS_A = (
    "import json, sys; given = json.load(sys.stdin); print(json.dumps([s.count('a') / 9 for s in given['steps']]))"
)


def run(scorer: Scorer, seconds: float = 60.0, cancel: CancelToken | None = None) -> str:
    """Return the best of four texts, which are scored after each token; check that no branch is left."""
    texts, branches = table_texts(random_table(4, n_vocab=3, length=3), max_tokens=3)
    texts.cancel = cancel
    ask, scores = CallerScorer(scorer, "prompt", seconds), [0.0] * 4
    try:
        with texts:
            root = texts.begin()
            live = [root, *(texts.fork(root) for _ in scores[1:])]
            while going := [i for i, text in enumerate(live) if text.ended is None]:
                tokens = [best_tokens(live[i].logits, 3)[i % 3] for i in going]
                grown = texts.advance([(live[i], token) for i, token in zip(going, tokens, strict=True)])
                for i, text in zip(going, grown, strict=True):
                    live[i] = text
                scores = ask(texts, live)
            return texts.text(live[max(range(4), key=scores.__getitem__)])
    finally:
        assert not branches.held


def test_a_function_and_a_command_that_say_the_same_give_the_same_text() -> None:
    """The command gets the prefix and all steps as JSON."""
    command = CommandScorer([sys.executable, "-c", COUNTS_A])
    assert run(lambda prefix, steps: [step.count("a") / 9 for step in steps]) == run(command)


def test_what_a_scorer_gets() -> None:
    """One call a round, with the prompt and the texts so far."""
    calls = list[tuple[str, list[str]]]()

    def scorer(prefix: str, steps: "list[str]") -> list[float]:
        calls.append((prefix, list(steps)))
        return [0.5] * len(steps)

    run(scorer)  # type: ignore[arg-type]
    assert {prefix for prefix, _ in calls} == {"prompt"}
    assert {len(steps) for _, steps in calls} == {4}
    assert len(calls) <= 3


@pytest.mark.parametrize("wrong", [None, [0.5], [0.5] * 5, [2.0] * 4, [float("nan")] * 4, ["x"] * 4, 7, "abcd"])
def test_scores_that_are_none_are_refused(wrong: object) -> None:
    """The message says what was returned and what was expected."""
    with pytest.raises(PluginError, match="4 numbers from 0 to 1"):
        run(lambda prefix, steps: wrong)  # type: ignore[arg-type]


def test_a_function_that_raises() -> None:
    """The error names what was raised; an EdgedecError goes through as it is."""
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        run(lambda prefix, steps: [1 / 0])
    with pytest.raises(RequestError, match="mine"):
        run(lambda prefix, steps: (_ for _ in ()).throw(RequestError("mine")))


def test_a_function_that_hangs() -> None:
    """After its seconds the search ends; cancelling ends it at once."""
    release = threading.Event()
    try:
        with pytest.raises(PluginError, match=r"longer than 0\.1 s"):
            run(lambda prefix, steps: [float(release.wait(60))] * len(steps), seconds=0.1)
        cancel = CancelToken()
        timer = threading.Timer(0.1, cancel.cancel)
        timer.start()
        with pytest.raises(CancelledError):
            run(lambda prefix, steps: [float(release.wait(60))] * len(steps), cancel=cancel)
    finally:
        release.set()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="children are ended with their process group")
def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """Neither the command nor what it started goes on."""
    note = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(60)']); open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    )
    with pytest.raises(PluginError, match="was ended"):
        run(CommandScorer([sys.executable, "-S", "-c", code], seconds=5))  # a busy machine starts Python slowly
    for pid in map(int, note.read_text().split()):
        for _ in range(100):
            if not is_running(pid):
                break
            time.sleep(0.05)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "status 3"),
        ("print('no json')", "JSON array"),
        ("print('{}')", "JSON array"),
        ("print('[' * 100000)", "JSON array"),
        ("print(' ' * 2000000)", "JSON array"),
        ("print([0.5])", "4 numbers"),
    ],
)
def test_a_command_that_fails(code: str, message: str) -> None:
    """The message says what was found."""
    with pytest.raises(PluginError, match=message):
        run(CommandScorer([sys.executable, "-c", code]))


def test_a_command_that_is_none() -> None:
    """A string is no argument list, and a program must exist."""
    for wrong in ("rm -rf", [], [1], None):
        with pytest.raises(OptionError, match="list of strings"):
            CommandScorer(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="above 0"):
        CommandScorer(["x"], seconds=0)
    with pytest.raises(PluginError, match="does not start"):
        run(CommandScorer(["no-such-program-at-all"]))


def test_checked_scores_are_floats() -> None:
    """numpy's numbers and integers are numbers."""
    assert checked_scores(np.array([0, 1]), 2) == [0.0, 1.0]
    assert letters([1, 2]) == "ab"
