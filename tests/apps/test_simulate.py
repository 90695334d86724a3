"""edgedec bench --rows and benchmarks/speed/simulate.py: recorded drafts under other costs."""

import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec.cost_curve import CostCurve
from edgedec.draft_constants import GAIN
from edgedec_apps.bench.recorder import Evaluated, Proposals
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, without

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))

from replay import replay
from rooflines import DEVICES, modelled
from simulate import main

HEAD = {"kind": "edgedec drafts 1", "model": "m", "n_bytes": 10**9, "n_params": 10**9}
WITH_MODEL = HEAD | {"draft_model": {"n_bytes": 2 * 10**8, "n_params": 2 * 10**8}}
ROW = {"tokens": [6, 7], "parents": [-1, 0], "paths": [0.9, 0.8], "draft_s": 0.0}
TEXT = {"id": "a", "task": "chat", "tokens": [5, 6, 7, 8, 9], "proposals": [ROW, ROW, ROW]}
TOKENS = list(range(10, 19))  # of a text that ways to draft are compared on
FLAT = '{"curve": {"1": 0.1, "16": 0.1}}'

Forwards = Sequence[tuple[int, float | None]]


def write(path: Path, *lines: object) -> Path:
    """Write a file of rows."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def chain(tokens: Sequence[int], forwards: Forwards = (), p: float = 0.99) -> dict[str, Any]:
    """Return a chain of proposals, known one after the other by as many forwards, or all of them without any."""
    n = len(tokens)
    return {
        "tokens": list(tokens),
        "parents": list(range(-1, n - 1)),
        "paths": [p ** (i + 1) for i in range(n)],
        "draft_s": 0.0,
        "evaluated": [list(made) for made in forwards],
        "after": list(range(1, n + 1)) if forwards else [0] * n,
    }


def text(proposals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return TOKENS with what was proposed after each of them."""
    return {"id": "a", "task": "chat", "tokens": TOKENS, "proposals": list(proposals)}


def drafting(share: float | None, *, right: bool = True) -> dict[str, Any]:
    """Return a text whose next three tokens, or others, are proposed everywhere, each for a forward."""
    return text(
        [
            chain([token + i if right else 99 for i in (1, 2, 3)], [(1, share)] * 3)
            for token in TOKENS[:-2]  # neither after the last token nor before it
        ]
    )


SUFFIX = text([chain([token + 1] if token % 2 == 0 else []) for token in TOKENS[:-2]])


def printed(*args: object) -> str:
    """Return what the script prints."""
    with redirect_stdout(io.StringIO()) as out:
        main([*map(str, args)])
    return out.getvalue()


def simulated(*args: object) -> Any:
    """Return what the script prints with --json."""
    return json.loads(printed(*args, "--json"))


def refused(*args: object, words: str) -> None:
    """Assert that the script ends with a message that has these words."""
    with pytest.raises(SystemExit, match=rf"^simulate\.py: .*{re.escape(words)}"):
        main([*map(str, args)])


# The replay


def test_a_replay_takes_what_pays() -> None:
    """On a flat curve both nodes are verified and the bonus token comes; where rows cost as much as steps, none is."""
    rows = [Proposals((6, 7), (-1, 0), (0.9, 0.8), 0.0)] * 3
    flat = replay([5, 6, 7, 8, 9], rows, lambda n: 1.0, 8)
    assert (flat.n_tokens, flat.n_steps, flat.seconds, flat.plain_s) == (4, 2, 2.0, 4.0)
    steep = replay([5, 6, 7, 8, 9], rows, lambda n: float(n), 8)
    assert (steep.n_steps, steep.seconds) == (4, 4.0)


def test_a_wrong_proposal_costs_what_it_costs() -> None:
    """A node that the text does not take is paid for and brings nothing."""
    rows = [Proposals((1,), (-1,), (0.9,), 0.0)] * 3
    found = replay([5, 6, 7, 8], rows, lambda n: 1.0 + 0.1 * n, 8)
    assert found.n_steps == 3
    assert found.seconds == pytest.approx(1.2 + 1.2 + 1.1)  # no room for a draft before the last token


def test_drafting_is_charged_and_no_deeper_than_it_is_let_go() -> None:
    """Of three forwards n are made where n are allowed, and as many nodes are known; without any it is plain."""
    made = (Evaluated(1, 0.25),) * 3
    rows = [Proposals((6, 7, 8), (-1, 0, 1), (0.9, 0.8, 0.7), 0.0, made, (1, 2, 3))] * 4
    seconds = [
        replay([5, 6, 7, 8, 9], rows, lambda n: 1.0, 8, lambda one: one.share or 0.0, n).seconds for n in range(4)
    ]
    # 4 plain steps; 6 + bonus, then nothing is right; 6, 7 + bonus, then one without room; all at once
    assert seconds == [4.0, 1.25 + 1.25 + 1.0, 1.5 + 1.0, 1.75]


def test_a_forward_that_is_unlikely_to_pay_is_not_made() -> None:
    """After a path of 0.3, where a forward takes 0.25 and a row 0.1 of a plain step; after one of 0.4 it is.

    All that is drafted is verified, and none of it right: 2 or 3 forwards and rows, then 4 plain steps.
    """
    made = (Evaluated(1, 0.25),) * 3
    for path, seconds in ((0.3, 0.5 + 1.2 + 4), (0.4, 0.75 + 1.3 + 4)):
        rows = [Proposals((1, 2, 3), (-1, 0, 1), (0.9, path, path), 0.0, made, (1, 2, 3))]
        found = replay([5, 6, 7, 8, 9, 10], rows, lambda n: 0.9 + 0.1 * n, 8, lambda one: 0.25)
        assert found.seconds == pytest.approx(seconds)


# One recording


@pytest.mark.slow
def test_figures_on_a_modelled_device_and_on_a_measured_curve(tmp_path: Path) -> None:
    """The device says that it is modelled; a curve that bench wrote is read."""
    rows = write(tmp_path / "rows.jsonl", HEAD, TEXT)
    document = simulated(rows, "--curve", "raspberry-pi-5")
    cost = modelled(DEVICES["raspberry-pi-5"], 10**9, 10**9)
    assert "MODELLED" in document["curve"]
    assert document["all"]["plain_tok_s"] == pytest.approx(1 / cost(1))
    assert document["all"]["accepted_per_step"] == pytest.approx(1.0)
    assert document["all"]["speedup"] == pytest.approx(4 * cost(1) / (cost(3) + cost(1)))
    curve = tmp_path / "curve.json"
    curve.write_text('{"curve": {"1": 0.1, "4": 0.1}}')
    assert simulated(rows, "--curve", curve)["all"]["speedup"] == pytest.approx(2)
    shown = printed(rows)
    assert all(name in shown for name in DEVICES)


def test_a_distant_target_makes_drafts_pay_more(tmp_path: Path) -> None:
    """Where n rows take n times as long nothing is drafted; with a second more for each forward, the right draft is."""
    rows = write(tmp_path / "rows.jsonl", HEAD, TEXT)
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps({"curve": {str(n): 0.1 * n for n in (1, 2, 4, 8, 16)}}))
    for delay_ms, speedup in (("0", 1.0), ("1000", 4.4 / 2.4)):
        found = simulated(rows, "--curve", curve, "--delay-ms", delay_ms)
        assert found["all"]["speedup"] == pytest.approx(speedup)
    refused(rows, "--delay-ms", "-1", words="--delay-ms is -1")


def test_it_says_whether_drafting_is_charged(tmp_path: Path) -> None:
    """A recording of an earlier release does not note what drafting evaluated: there it is left out."""
    old, new = write(tmp_path / "old.jsonl", HEAD, TEXT), write(tmp_path / "new.jsonl", HEAD, drafting(0.3))
    curve = tmp_path / "curve.json"
    curve.write_text(FLAT)
    assert printed(old, "--curve", curve).splitlines() == [
        "m · without the time of drafting",
        "",
        "measured, curve.json",
        "task  tok/s  plain  speedup  accepted/step",
        "chat   20.0   10.0     2.00           1.00",
        "all    20.0   10.0     2.00           1.00",
    ]
    assert printed(new, "--curve", curve).splitlines() == [
        "m · with the time of drafting",
        "",
        "measured, curve.json",
        "task  tok/s  plain  speedup  accepted/step",
        "chat   21.1   10.0     2.11           3.00",
        "all    21.1   10.0     2.11           3.00",
        "at most 3 forwards of drafting before a step",
    ]


def test_a_draft_models_forwards_cost_what_its_size_says(tmp_path: Path) -> None:
    """On a modelled device by its own bytes and parameters, reading the prompt included; on a curve by its bytes."""
    found = drafting(None)
    found["proposals"][0]["evaluated"][0] = [65, None]
    rows = write(tmp_path / "model.jsonl", WITH_MODEL, found)
    cost, price = (modelled(DEVICES["raspberry-pi-5"], n, n) for n in (10**9, 2 * 10**8))
    document = simulated(rows, "--curve", "raspberry-pi-5")
    assert document["n_forwards"] == 3
    assert document["all"]["speedup"] == pytest.approx(8 * cost(1) / (2 * cost(4) + price(65) + 5 * price(1)))
    curve = tmp_path / "curve.json"
    curve.write_text('{"curve": {"1": 0.1, "16": 0.1, "128": 0.5}}')
    document = simulated(rows, "--curve", curve)
    assert document["curve"] == "measured, curve.json; the draft model's times are scaled by its bytes"
    assert document["all"]["speedup"] == pytest.approx(0.8 / (0.2 + 0.2 * 0.5 + 5 * 0.2 * 0.1))


def test_a_drafter_that_evaluates_is_given_a_forward(tmp_path: Path) -> None:
    """Beside free proposals, too, and where all that it adds is wrong: the figures say what it would cost."""
    both = text(
        [
            chain([token + 1]) | {"evaluated": [[1, 0.5]]} if token % 2 == 0 else chain([99], [(1, 0.5)])
            for token in TOKENS[:-2]
        ]
    )
    curve = tmp_path / "curve.json"
    curve.write_text(FLAT)
    document = simulated(write(tmp_path / "both.jsonl", HEAD, both), "--curve", curve)
    assert (document["n_forwards"], document["all"]["speedup"]) == (1, pytest.approx(8 / (4 + 4 * 0.5)))
    alone = write(tmp_path / "alone.jsonl", HEAD, drafting(0.5, right=False))
    document = simulated(alone, "--curve", curve)
    assert (document["n_forwards"], document["all"]["speedup"]) == (1, pytest.approx(8 / (8 + 7 * 0.5)))


# Several recordings


def test_ways_stand_side_by_side(tmp_path: Path) -> None:
    """Tokens that are right for 0.3 of the bytes each beat every second token for nothing; the fastest is named."""
    suffix = write(tmp_path / "suffix.jsonl", HEAD, SUFFIX)
    skip = write(tmp_path / "skip.jsonl", HEAD, drafting(0.3))
    curve = tmp_path / "curve.json"
    curve.write_text(FLAT)
    assert printed(suffix, skip, "--curve", curve).splitlines() == [
        "m · with the time of drafting",
        "",
        "measured, curve.json",
        "way     tok/s  speedup  accepted/step  draft forwards  chat",
        "plain    10.0     1.00           0.00               -  1.00",
        "suffix   20.0     2.00           1.00               -  2.00",
        "skip     21.1     2.11           3.00               3  2.11",
        "best: skip",
    ]


def test_a_task_may_have_another_best_way(tmp_path: Path) -> None:
    """Where skip is right in one task only, suffix is the fastest over all, as it was in both."""
    code = {"id": "b", "task": "code"}
    suffix = write(tmp_path / "suffix.jsonl", HEAD, SUFFIX, SUFFIX | code)
    skip = write(tmp_path / "skip.jsonl", HEAD, drafting(0.05), drafting(0.05, right=False) | code)
    curve = tmp_path / "curve.json"
    curve.write_text(FLAT)
    document = simulated(suffix, skip, "--curve", curve)
    assert (document["best"], document["best_by_task"]) == ("suffix", {"chat": "skip", "code": "suffix"})
    assert document["ways"]["skip"]["tasks"]["chat"] > document["ways"]["suffix"]["tasks"]["chat"] == pytest.approx(2)
    assert printed(suffix, skip, "--curve", curve).splitlines()[-1] == "best: suffix · chat: skip"


@pytest.mark.parametrize(
    ("ways", "best", "speedup"),
    [
        ({"skip": drafting(0.9), "suffix": SUFFIX}, "suffix", 8 / 4),
        ({"skip": drafting(0.9), "exit": drafting(0.3, right=False)}, "skip", 8 / (2 + 6 * 0.9)),
        ({"skip": drafting(0.3, right=False), "exit": drafting(0.9, right=False)}, "plain", 1.0),
        ({"skip": drafting(0.3), "model": drafting(None), "suffix": SUFFIX}, "model", 8 / (2 + 6 * 0.2)),
    ],
)
def test_the_best_way_is_the_fastest(
    tmp_path: Path, ways: dict[str, dict[str, Any]], best: str, speedup: float
) -> None:
    """Dear drafts lose to free ones, wrong ones to plain decoding, and a smaller share wins."""
    curve = tmp_path / "curve.json"
    curve.write_text(FLAT)
    paths = [write(tmp_path / f"{way}.jsonl", WITH_MODEL, found) for way, found in ways.items()]
    document = simulated(*paths, "--curve", curve)
    assert list(document["ways"]) == ["plain", *ways]
    assert document["best"] == best
    assert document["ways"][best]["speedup"] == pytest.approx(speedup)
    assert document["ways"]["plain"]["speedup"] == 1.0
    assert document["ways"][best]["tok_s"] == max(found["tok_s"] for found in document["ways"].values())


def test_every_modelled_device_has_a_table(tmp_path: Path) -> None:
    """In the order of the devices, each with the same ways."""
    paths = [write(tmp_path / f"{name}.jsonl", HEAD, found) for name, found in (("a", SUFFIX), ("b", drafting(0.3)))]
    documents = simulated(*paths)
    assert [one["curve"].split(",")[0] for one in documents] == list(DEVICES)
    assert all(list(one["ways"]) == ["plain", "a", "b"] for one in documents)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((HEAD, text(SUFFIX["proposals"]) | {"tokens": [*TOKENS[:-1], 99]}), "holds other texts"),
        ((HEAD | {"n_bytes": 5}, SUFFIX), "or those of another model"),
        ((HEAD, TEXT), "lacks the forwards that drafting made"),
    ],
)
def test_what_can_not_be_compared_is_refused(tmp_path: Path, lines: Sequence[object], words: str) -> None:
    """Other texts, another model, and a recording that would look free."""
    first, other = write(tmp_path / "skip.jsonl", HEAD, drafting(0.3)), write(tmp_path / "other.jsonl", *lines)
    refused(first, other, words=words)
    refused(first, other, words=str(other))


def test_every_way_needs_its_own_name(tmp_path: Path) -> None:
    """Two files of one name, and one that is called as plain decoding is."""
    first = write(tmp_path / "skip.jsonl", HEAD, drafting(0.3))
    (tmp_path / "elsewhere").mkdir()
    for name in ("elsewhere/skip.jsonl", "plain.jsonl"):
        refused(first, write(tmp_path / name, HEAD, SUFFIX), words="its own name")


# What `auto` does


def agreeing(agreement: float, share: float, n_tokens: int = 1200, depth: int = 8) -> list[Proposals]:
    """Return chains whose every token is right with that probability, for the text 0, 1, 2, ..."""
    rng = np.random.default_rng(0)
    parents, after = tuple(range(-1, depth - 1)), tuple(range(1, depth + 1))
    paths, made = tuple(agreement**i for i in after), (Evaluated(1, share),) * depth
    rows = []
    for i in range(n_tokens):
        right = (rng.random(depth) < agreement).cumprod()
        tokens = tuple(i + 1 + j if right[j] else -1 for j in range(depth))
        rows.append(Proposals(tokens, parents, paths, 0.0, made, after))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("agreement", "share", "pays"), [(0.97, 0.3, True), (0.9, 0.5, True), (0.67, 0.79, False)])
def test_auto_takes_a_tuned_set_where_the_replay_finds_it_faster(
    name: str, agreement: float, share: float, pays: bool
) -> None:
    """On every modelled device: what its curve promises of a set is what chains of that agreement bring there."""
    cost = modelled(DEVICES[name], 10**9, 15 * 10**8)
    tuned = TunedSet(without(4, [(1, 0)]), share, share, agreement, 1000)
    promised = tuned.promised_gain(CostCurve({n: cost(n) for n in range(1, 17)}), 8)
    rows = agreeing(agreement, share)
    found = [replay(range(1200), rows, cost, 8, lambda made: share * cost(1), n) for n in range(1, 9)]
    speedup = max(one.plain_s / one.seconds for one in found)
    assert (promised >= GAIN) is pays
    assert (speedup >= GAIN) is pays
    assert speedup == pytest.approx(promised, rel=0.05)


# Files


@pytest.mark.slow
def test_what_bench_records_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model, from the recording to the table."""
    monkeypatch.setattr("edgedec_runtimes.cpu.tiles.read_rates.memory_rate", lambda *_: 1e10)
    target, small = (tiny_llama(tmp_path / f"{seed}.gguf", seed=seed, n_ctx_train=512) for seed in (1, 2))
    prompts, rows = write(tmp_path / "prompts.jsonl", {"id": "a", "task": "chat", "turns": ["abab"]}), tmp_path / "rows"
    model = ("--draft", "model", "--draft-option", f"model={small}")
    assert run_here("bench", target, "--prompts", prompts, "-n", "6", *model, "--rows", rows).code == 0
    head, found = (json.loads(line) for line in rows.read_text().splitlines())
    assert head["draft_model"]["n_bytes"] == small.stat().st_size
    assert (len(found["tokens"]), len(found["proposals"])) == (6, 4)  # the first token and the last have no draft
    assert all(row["evaluated"] and {share for _, share in row["evaluated"]} == {None} for row in found["proposals"])
    assert printed(rows).splitlines()[0].endswith("· with the time of drafting")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "not a file of recorded drafts"),
        ([{"kind": "other"}], "not a file of recorded drafts"),
        ([HEAD], "no prompt"),
        ([HEAD, {"id": "a"}], "line 2"),
        ([HEAD, TEXT | {"proposals": []}], "line 2: 5 tokens with proposals for 0"),
        ([HEAD, TEXT | {"proposals": [ROW | {"parents": [1, 0]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"paths": [2.0, 0.1]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[0, 0.5]]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, 1.5]]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1]]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, 0.5]], "after": [1, 2]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, 0.5]], "after": [1]}] * 3}], "line 2"),
        ([HEAD, drafting(None)], "line 1: no draft model"),
        ([HEAD | {"n_bytes": 0}, TEXT], "line 1"),
        ([{"kind": "edgedec drafts 1"}, TEXT], "line 1"),
    ],
)
def test_damaged_rows_are_refused(tmp_path: Path, lines: list[object], words: str) -> None:
    """The line is named."""
    refused(write(tmp_path / "rows.jsonl", *lines), words=words)


def test_what_is_no_curve_is_refused(tmp_path: Path) -> None:
    """Neither a device nor a file, and a file of something else."""
    rows = write(tmp_path / "rows.jsonl", HEAD, TEXT)
    refused(rows, "--curve", "toaster", words="'toaster' is neither a file nor a device; the devices are: raspberry-pi")
    for content in ("", "[]", '{"curve": {}}', '{"curve": {"0": 1}}', '{"curve": {"a": 1}}'):
        (tmp_path / "curve.json").write_text(content)
        refused(rows, "--curve", tmp_path / "curve.json", words="not a cost curve")
    refused(tmp_path / "none.jsonl", words="can't be read")
