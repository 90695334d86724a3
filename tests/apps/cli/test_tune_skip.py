"""edgedec tune-skip: what it prints and keeps, that it finds the same set again, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.api.options import Lossy
from edgedec_apps.evaluation.tune_skip import lines

OPTIONS = ("--positions", "100", "--threads", "1", "-q")


@pytest.fixture(scope="session")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of four layers."""
    path = tmp_path_factory.mktemp("cli") / "layered.gguf"
    return tiny_llama(path, seed=2, n_layer=4, n_ff=96, n_ctx_train=1024)


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEDEC_RUNTIME", "cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 1,000 tokens of the tiny model."""
    path = tmp_path / "a text.txt"
    path.write_text("".join(f"The {i}th ferry left at {i % 24} past six. " for i in range(40))[:1000], encoding="utf-8")
    return path


def document(*args: Any) -> dict[str, Any]:
    """Return what the command prints with --json, when it succeeds and says nothing else."""
    result = run_here("tune-skip", *args, "--seconds", "3600", *OPTIONS, "--json")
    assert result.err == "", result
    return result.document()


@pytest.mark.slow
def test_it_finds_the_same_set_again_and_runs_with_it(layered: Path, text: Path, cache: Path) -> None:
    """By the same seed; it is kept, taken by --draft skip, and the text stays plain decoding's."""
    first, again = (document(layered, "--text", text, "--seed", "3") for _ in range(2))
    assert (first["left_out"], first["sets"]) == (again["left_out"], again["sets"])
    assert first["search"]["n_scored"] == again["search"]["n_scored"] > 4
    assert not first["search"]["ended_by_limit"]
    assert first["share"] == first["sets"]["found"]["share"] <= 0.8
    assert list(first["sets"]) == ["found", "evenly spaced", "late", "early exit"]
    assert {row["n_positions"] for row in first["sets"].values()} == {first["sets"]["found"]["n_positions"]}
    (kept,) = (cache / "probes").glob("draft-layer-set-*.json")
    assert json.loads(kept.read_text())["share"] == first["share"]
    options = ("--raw", "-c", "256", "-n", "30", "-t", "0", "--method=ignore-end")
    plain, skipping = (run_here("run", layered, "the cat", *options, "--draft", name) for name in ("off", "skip"))
    assert (plain.code, skipping.code) == (0, 0)
    assert skipping.out == plain.out
    assert "every fourth" not in skipping.err


@pytest.mark.slow
def test_a_lossy_search_is_another_one(layered: Path, text: Path, cache: Path) -> None:
    """Its set is kept apart, found in texts all of whose tokens go through it, and --layer-skip takes it."""
    drafts, lossy = document(layered, "--text", text), document(layered, "--text", text, "--lossy")
    assert (lossy["lossy"], lossy["promised_speedup"], lossy["auto"]) == (True, None, False)
    assert lossy["sets"]["found"]["kl_mean"] > drafts["sets"]["found"]["kl_mean"]
    assert len(list((cache / "probes").glob("lossy-layer-set-*.json"))) == 1
    said = "".join(lines(lossy))
    assert lossy["options"] in said
    assert "plain decoding" not in said
    assert lossy["options"].endswith(",force=yes"), "a model that was never measured"
    result = run_here("run", layered, "the cat", "--raw", "-n", "4", *lossy["options"].split(), "--json")
    assert result.code == 0, result
    out = sorted((layer, half) for half, name in enumerate(("attn", "mlp")) for layer in lossy["left_out"][name])
    speedup = float(lossy["options"].split(":")[1].partition(",")[0])
    with edgedec.load(layered, runtime="cpu", lossy=Lossy(layer_skip=speedup, layer_skip_force=True)) as engine:
        assert sorted(engine.card.left_out) == out


@pytest.mark.slow
def test_the_table_is_for_a_person(layered: Path) -> None:
    """A row for every set, what is left out, and whether it pays; without --text on our own texts."""
    result = run_here("tune-skip", layered, *OPTIONS)
    assert (result.code, result.err) == (0, "")
    shown = result.text.splitlines()
    assert shown[0].startswith(f"{layered} · ")
    assert [line.split("  ")[0] for line in shown[2:7]] == ["set", "found", "evenly spaced", "late", "early exit"]
    assert "feed-forward of" in result.text
    assert "plain decoding's speed" in result.text


@pytest.mark.slow
def test_a_limit_is_reported(layered: Path, text: Path, cache: Path) -> None:
    """That the set may not be found again is said; where nothing was found, nothing is kept."""
    found = document(layered, "--text", text)
    assert "--seconds ended the search" not in "".join(lines(found))
    found["search"]["ended_by_limit"] = True
    assert "--seconds ended the search" in "".join(lines(found))
    (kept,) = (cache / "probes").glob("draft-layer-set-*.json")
    kept.unlink()
    run_here("tune-skip", layered, "--text", text, "--seconds", "1e-6", *OPTIONS).failed(40, "nothing to leave out")
    assert not kept.exists()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--seconds", "0"), "--seconds"),
        (("--least", "1"), "--least"),
        (("--least", "0"), "--least"),
        (("--positions", "0"), "--positions"),
    ],
)
def test_what_is_out_of_range_is_refused(layered: Path, args: tuple[str, str], word: str) -> None:
    """Before anything is loaded, by the option's name."""
    run_here("tune-skip", layered, *args).failed(40, word)


def test_a_short_text_is_refused(layered: Path, tmp_path: Path) -> None:
    """With its tokens and what it takes."""
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    run_here("tune-skip", layered, "--text", path, "-q").failed(40, "9 tokens", "510")
