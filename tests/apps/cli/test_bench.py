"""edgedec bench: what is run in which order, and what the command prints and refuses."""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.stub_drafter import StubDrafter
from support.processes.command_line import interrupt_when, run_here

import edgedec
from edgedec.api.engine import Engine
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext
from edgedec.progress import CancelToken, Progress
from edgedec_apps.bench.measure import (
    PLAIN,
    Rounds,
    Run,
    Runner,
    RunOptions,
    Trial,
    engine_runner,
    measure,
    order,
    warm_up,
)
from edgedec_apps.bench.prompts import BenchRequest, one_of_each

pytestmark = pytest.mark.usefixtures("drafting")

FIGURES = {"tok_s", "plain_tok_s", "speedup", "identical", "accepted_per_step"}


def request(name: str, task: str = "chat", n_tokens: int = 1) -> BenchRequest:
    """Return a prompt of `n_tokens` tokens."""
    return BenchRequest(name, task, (1,) * n_tokens, 7)


def logged(log: list[str], n_tokens: Mapping[str, int], stop_at: int | None = None) -> dict[str, Runner]:
    """Return ways that note what is run, and give as many tokens as the prompt has; cancelled at one of the runs."""

    def way(name: str) -> Runner:
        def run(asked: BenchRequest, cancel: CancelToken) -> Run | None:
            if len(log) == stop_at:
                cancel.cancel()
                return None
            log.append(f"{asked.id} {name}")
            return Run(tuple(range(n_tokens[asked.id])), 1.0, 2.0)

        return run

    return {name: way(name) for name in "spa"} | {PLAIN: way("p")}


def rounds_of(trials: Sequence[Trial]) -> dict[str, int]:
    """Return how often each prompt was run."""
    return {name: sum(one.request.id == name for one in trials) for name in sorted({t.request.id for t in trials})}


# What is run


def test_every_way_takes_every_place_equally_often() -> None:
    """Over six turns each of three ways is twice first, twice second, twice last, and each order comes once."""
    orders = [order("abc", turn) for turn in range(6)]
    assert len({tuple(one) for one in orders}) == 6
    for place in range(3):
        assert sorted(one[place] for one in orders) == list("aabbcc")


def test_the_order_changes_from_prompt_to_prompt_and_from_round_to_round() -> None:
    """Two prompts, two rounds, three ways: twelve runs in an order that can be read off."""
    log: list[str] = []
    ways = {name: run for name, run in logged(log, {"x": 4, "y": 4}).items() if name in (*"sa", PLAIN)}
    trials = measure([request("x"), request("y")], ways, CancelToken(), rounds=Rounds(2, 600))
    assert log == [*("x s", "x a", "x p", "y a", "y p", "y s"), *("x a", "x p", "x s", "y p", "y s", "y a")]
    assert [(one.request.id, one.round) for one in trials] == [("x", 0), ("y", 0), ("x", 1), ("y", 1)]
    assert all(list(one.runs) == ["s", "a", PLAIN] for one in trials)


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [((160, 160, 160, 160), 1), ((160, 160, 160, 0), 2), ((300, 299, 0, 0), 2), ((10, 10, 10, 10), 5), ((0,) * 4, 5)],
)
def test_a_task_ends_after_600_tokens_or_five_rounds(n_tokens: Sequence[int], expected: int) -> None:
    """Rounds of a task go on until 600 tokens or five rounds, whichever comes first; every prompt runs as often."""
    lengths = dict(zip("wxyz", n_tokens, strict=True))
    trials = measure([request(name) for name in lengths], logged([], lengths), CancelToken())
    assert rounds_of(trials) == dict.fromkeys("wxyz", expected)


def test_tasks_end_on_their_own() -> None:
    """A task of long answers ends after its first round, one of short answers goes on to the fifth."""
    requests = [request("long", "a"), request("short", "b")]
    told: list[Progress] = []
    ways = logged([], {"long": 700, "short": 10})
    trials = measure(requests, ways, CancelToken(), on_progress=told.append, rounds=Rounds())
    assert rounds_of(trials) == {"long": 1, "short": 5}
    n_ways = len(ways)
    totals = [*[10 * n_ways] * (n_ways + 1), *[6 * n_ways] * (5 * n_ways)]
    assert [(one.phase, one.done, one.total) for one in told] == [
        ("measuring the prompts", n, total) for n, total in enumerate(totals)
    ], "until a task's first round has ended, it counts with all rounds"
    left = [one.left_s for one in told if one.left_s is not None]
    assert (len(left), left[-1]) == (6 * n_ways, 0.0)
    assert left == sorted(left, reverse=True), "the time that is left only falls"


def test_a_cancelled_trial_does_not_count() -> None:
    """What was cancelled before all ways of a prompt had run leaves the trials before it."""
    log: list[str] = []
    ways = logged(log, {"x": 4, "y": 4}, stop_at=6)
    assert rounds_of(measure([request("x"), request("y")], ways, CancelToken())) == {"x": 1}
    assert len(log) == 6


def test_the_longest_prompt_warms_up() -> None:
    """Before the measurement every different way runs the longest prompt once; cancelled, it says so."""
    log: list[str] = []
    ways = logged(log, {"x": 1, "y": 1}, stop_at=4)
    requests = [request("x"), request("y", n_tokens=3)]
    assert warm_up(requests, ways | {"again": ways["s"]}, CancelToken())
    assert log == ["y s", "y p", "y a", "y p"]
    assert not warm_up(requests, ways, CancelToken())


class FakeEngine:
    """Notes what it is asked for, and answers three tokens with scripted statistics."""

    def __init__(self, finish_reason: str = "stop") -> None:
        self.asked: list[Any] = []
        self._finish_reason = finish_reason

    def forget(self) -> None:
        self.asked.append("forget")

    def generate(self, prompt: Sequence[int], **options: Any) -> Any:
        """Note the prompt and the options, and answer."""
        options.pop("cancel")
        self.asked.append((list(prompt), options))
        times = {"first_token_s": 0.5, "total_s": 2.5, "draft_s": 0.75}
        counts = {"n_steps": 2, "n_accepted_tokens": 1, "n_drafts": 3}
        stats = SimpleNamespace(**times, **counts, reasons=["why"], notes=[])
        return SimpleNamespace(token_ids=(5, 6, 7), finish_reason=self._finish_reason, stats=stats)


def fake(engine: FakeEngine) -> Engine:
    """Return a fake engine as what it stands for."""
    return cast(Engine, engine)


@pytest.mark.parametrize("warm_store", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_a_run_starts_cold(warm_store: bool, draft: bool) -> None:
    """Before a run another prompt takes its place in the KV cache and the stores are emptied, unless kept warm."""
    engine = FakeEngine()
    way = engine_runner(fake(engine), RunOptions(20, 0.7, 0.9, warm_store), draft=draft)
    found = way(BenchRequest("a", "chat", (0, 9), 11), CancelToken())
    assert found == Run((5, 6, 7), 0.5, 2.5, 2, 1, ("why",), 0.25)
    assert (found.decode_s, found.n_decoded) == (2.0, 2)
    other = ([1], {"max_tokens": 1, "temperature": 0.0, "draft": False})
    measured = ([0, 9], {"max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "seed": 11, "draft": draft})
    assert engine.asked == [other, *([] if warm_store else ["forget"]), measured]


def test_a_cancelled_run_is_none() -> None:
    """A generation that was cancelled is no run."""
    way = engine_runner(fake(FakeEngine("cancelled")), RunOptions(20), draft=True)
    assert way(request("a"), CancelToken()) is None


class Remembering(StubDrafter):
    """Drafts what the request before generated, which it keeps in the store."""

    def __init__(self, context: DraftContext) -> None:
        self._store = context.store.setdefault("remembering", {"text": []})
        self._known: list[int] = list(self._store["text"])
        self._text: list[int] = []
        self._store["text"] = self._text

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose what came at this place the last time."""
        at = len(self._text)
        return Draft.chain(self._known[at : at + min(n_max, 3)])

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        self._text.extend(verification.token_ids)


@pytest.mark.slow
def test_a_prompt_run_twice_accepts_the_same(model: Path) -> None:
    """With a drafter that learns from earlier requests, repetitions accept nothing more, unless stores stay warm."""
    with edgedec.load(model, runtime="reference", draft=Remembering) as engine:
        accepted = {}
        for warm_store in (False, True):
            way = engine_runner(engine, RunOptions(24, warm_store=warm_store), draft=True)
            runs = [way(BenchRequest("a", "chat", (1, 70, 80), 0), CancelToken()) for _ in range(3)]
            assert all(run is not None and run.token_ids == runs[0].token_ids for run in runs if runs[0])
            accepted[warm_store] = [run.n_accepted for run in runs if run is not None]
    assert accepted[False] == [0, 0, 0]
    assert min(accepted[True][1:]) > 0


# The command


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure the bandwidth, for time's sake."""
    monkeypatch.setattr("edgedec_runtimes.cpu.tiles.read_rates.memory_rate", lambda *_: 1e10)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two tasks of one short prompt each."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": name, "task": task, "turns": [name * 4]} for name, task in (("a", "chat"), ("b", "code"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_json_holds_everything(model: Path, prompts: Path, tmp_path: Path, temperature: str) -> None:
    """--json and --json-out hold the same object: figures by task and over all, noise, curve, machine."""
    files = ("--json-out", tmp_path / "out.json", "--curve-out", tmp_path / "curve.json")
    drawn = ("-n", "6", "-t", temperature, "--top-p", "0.9")
    result = run_here("bench", model, "--prompts", prompts, *drawn, "--json", *files)
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert list(found["tasks"]) == ["chat", "code"]
    for one in (found["all"], *found["tasks"].values()):
        assert one.keys() >= FIGURES
        assert one["identical"] is True
    assert found.keys() >= {"worst_prompt_speedup", "bandwidth_gb_s", "peak_rss_bytes"}
    assert (found["runtime"], found["temperature"], found["max_tokens"]) == ("reference", float(temperature), 6)
    assert found["top_p"] == 0.9
    assert (found["against"], found["interrupted"], found["warm_store"]) == ({}, False, False)
    assert found["noise"].keys() >= {"ratio", "spread"}
    assert "1" in found["curve"]
    assert found["versions"].keys() >= {"edgedec", "python", "numpy", "machine", "cores"}
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert list(curve) == ["model", "runtime", "threads", "curve"]
    assert {n: 1000 * seconds for n, seconds in curve["curve"].items()} == found["curve"]


@pytest.mark.slow
def test_the_table_goes_to_standard_output(model: Path, prompts: Path) -> None:
    """Without --json there is a line for each task and one for all; warm stores have a heading of their own."""
    result = run_here("bench", model, "--prompts", prompts, "-n", "4", "--warm-store")
    assert (result.code, result.err) == (0, "")
    heading, _, *table = result.text.splitlines()
    assert "WARM STORES" in heading
    assert [line.split()[0] for line in table[:4]] == ["task", "chat", "code", "all"]


@pytest.mark.slow
def test_against_llamacpp(model: Path, prompts: Path) -> None:
    """llama.cpp is measured on the same prompts, with its own prompt lookup where the tokens are greedy."""
    args = ("bench", model, "--prompts", prompts, "-n", "6", "--threads", "1", "--against", "llamacpp", "--json")
    found = json.loads(run_here(*args).out)["against"]["llamacpp"]
    assert found["tok_s"] > 0
    assert (found["lookup_tok_s"] is None) == (found["lookup_reason"] is not None)
    found = json.loads(run_here(*args, "-t", "1").out)["against"]["llamacpp"]
    assert (found["lookup_tok_s"], found["lookup_reason"]) == (None, "at a temperature it would draw other tokens")


@pytest.mark.slow
def test_against_our_own_runtime(model: Path, prompts: Path) -> None:
    """What a GPU has to beat is measured in turns with it, with its drafts."""
    args = ("bench", model, "--prompts", prompts, "-n", "6", "--threads", "1", "--runtime", "reference")
    found = run_here(*args, "--against", "cpu")
    assert re.search(r"^cpu: \d+\.\d tok/s$", found.text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_prints_what_was_measured(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, word: str
) -> None:
    """A signal after the first prompt ends with its figures, which say that they are not all, and a signal's status."""
    n_ways = 3  # with drafts, plainly, and plainly again
    interrupt_when(monkeypatch, lambda one: (one.phase, one.done) == ("measuring the prompts", n_ways), number)
    result = run_here("bench", model, "--prompts", prompts, "-n", "4", "--json")
    assert (result.code, result.err) == (128 + number, f"edgedec: {word}\n")
    found = json.loads(result.out)
    assert (found["interrupted"], found["all"]["n_prompts"], list(found["tasks"])) == (True, 1, ["chat"])


@pytest.mark.slow
def test_a_table_comes_before_the_end(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time for it has passed, the tasks so far stand on standard error, one prompt of each task first."""
    monkeypatch.setattr("edgedec_apps.bench.run._FIRST_TABLE_S", 0.0)
    result = run_here("bench", model, "--prompts", prompts, "-n", "4")
    assert [line.split()[0] for line in result.err.splitlines()] == ["task", "chat", "all"]
    requests = [request(name, task) for name, task in ("au", "bu", "cv", "dw", "ew")]
    assert [each.id for each in one_of_each(requests)] == ["a", "c", "d", "b", "e"]


@pytest.mark.parametrize(
    ("args", "lacking", "words"),
    [
        (("--against", "llamacpp"), "edgedec_runtimes.llamacpp.library.trial.choice", "pip install"),
        (("--plot", "x.svg"), "edgedec_apps.plots.find_spec", "pip install"),
    ],
)
def test_what_is_lacking_is_said_first(
    model: Path, monkeypatch: pytest.MonkeyPatch, args: Sequence[str], lacking: str, words: str
) -> None:
    """A package that is not installed is named before anything is measured or loaded."""
    monkeypatch.setattr(lacking, lambda *_: None)
    monkeypatch.setattr("edgedec_apps.bench.run._measure", lambda *_: pytest.fail("it began to measure"))
    run_here("bench", model, *args).failed(30, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("-n", "1"), 40, "--max-tokens is 1"),
        (("-t", "-1"), 40, "temperature"),
        (("--top-p", "2"), 40, "--top-p"),
        (("--per-task", "0"), 40, "--per-task is 0"),
        (("--against", "gpt"), 40, "it must be llamacpp or cpu"),
        (("--prompt-cache", "x"), 40, "--prompt-cache"),
        (("--curve-out", "no/such/folder"), 60, "no directory"),
        (("--prompts", "missing"), 60, "can't be read"),
        (("-n", "3000"), 41, "the prompt chat-balcony takes"),
    ],
)
def test_what_is_refused(model: Path, args: Sequence[str], code: int, words: str) -> None:
    """Options out of range, files that can't be written or read, and prompts over the context are refused."""
    run_here("bench", model, *args).failed(code, words)
