"""The whole command: a drafter comes out that fits its target, whatever killed the runs before."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.heads.killed_training import Training, kill, train
from support.heads.tiny_rows import arranged
from support.models.tiny_quantized import ARCHITECTURES, write_tiny
from support.processes.command_line import run_here

import edgedec
from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.gguf.file import read_gguf
from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions
from edgedec_export.training.lessons.prompt_files import read_prompts
from edgedec_export.training.train_drafter import TrainOptions, train_drafter
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import BlockShape
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

WITHOUT_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="training needs torch, which is not installed")
OPTIONS = ("--tokens", "4200", "--answer-tokens", "20", "--vocabulary", "64", "--threads", "1", "--offline")


def needs_torch(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as slow, and leave it out where torch is missing."""
    return pytest.mark.slow(WITHOUT_TORCH(test))  # type: ignore[no-any-return]


def names_and_bytes(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 200 prompts, more than the answers need."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(f"prompt {i}" for i in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A head that one run trained, and the command's report."""
    head = tmp_path_factory.mktemp("trained") / "head"
    result = run_here("train-drafter", target, "--out", head, "--prompts", prompts, *OPTIONS, "--json", "-q")
    assert (result.code, result.err) == (0, ""), result
    return head, json.loads(result.out)


@needs_torch
def test_a_head_comes_out(target: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    """It fits its target; its card promises what the report says; the record holds the recipe."""
    folder, report = trained
    head = load_head(folder)
    assert fit(head, read_gguf(target)).notes == ()
    assert head.card.promise is not None
    assert [round(chance, 4) for chance in head.card.promise.reach] == report["kinds"]["all"]["reach"]
    assert (head.card.n_vocab_draft, report["vocabulary"]) == (64, 64)
    about = json.loads((folder / "edgedec-head.json").read_text())["about"]
    assert about["recipe"]["answer_tokens"] >= 4200
    assert about["report"]["pays"] == report["pays"]
    assert report["kinds"]["all"]["tokens"] == sum(kind["tokens"] for kind in report["kinds"].values()) / 2
    assert len(report["history"]) > 10
    assert report["sentence"].startswith("the head gives ")


@needs_torch
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures(name: str, prompts: Path, tmp_path: Path) -> None:
    """From a model to a head that fits it and drafts on the cpu runtime."""
    model = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], n_layer=7, n_embd=64, n_ff=64))
    options = TrainOptions(
        prompts=read_prompts([prompts]), n_tokens=1600, n_answer=8, n_vocabulary=64, n_passes=0.1, n_threads=1
    )
    found = train_drafter(model, tmp_path / "head", options)
    assert found.history
    with Cpu().load(model, LoadOptions(n_ctx=64, draft_head=found.path)) as opened:
        session = opened.session(64)
        session.forward(np.arange(8, dtype=np.int32), n_past=0)
        assert session.draft_head is not None
        assert session.draft_head.notes == ()
        chain = session.draft_head.chain(8, 8, ChainRules(3))
        assert len(chain.tokens) == 3
        assert set(chain.tokens) <= set(session.draft_head.token_ids.tolist())


@needs_torch
@pytest.mark.parametrize("kind", ["transfer", "prompts", "exit"])
def test_heads_that_split_forwards(kind: str, target: Path, prompts: Path, tmp_path: Path) -> None:
    """From a model to a GGUF that fits it and promises what the report says; the same command only reports again."""
    out = tmp_path / "out.gguf"
    which = ("train-drafter", target, "--kind", kind, "--out", out, "--prompts", prompts)
    command = (
        *which,
        "--answer-tokens",
        "8",
        "--tokens",
        "1600",
        "--vocabulary",
        "64",
        "--passes",
        "0.5",
        "--threads",
        "1",
    )
    result = run_here(*command, "--json", "-q")
    assert (result.code, result.err) == (0, ""), result
    head, report, written = load_head(out), json.loads(result.out), out.read_bytes()
    assert fit(head, read_gguf(target)).notes == ()
    assert head.card.promise is not None
    assert [round(chance, 4) for chance in head.card.promise.reach] == report["kinds"]["all"]["reach"]
    assert head.card.splits_forwards
    assert head.card.split_layer == {"transfer": 3, "prompts": 0, "exit": 2}[kind]
    assert run_here(*command, "-q").code == 0
    assert out.read_bytes() == written
    with Cpu().load(target, LoadOptions(n_ctx=64, draft_head=out)) as model:
        session = model.session(64)
        assert session.draft_head is not None
        assert arranged(session) is None
        session.forward(np.arange(8, dtype=np.int32), n_past=0)
        assert len(session.draft_head.chain(8, 8, ChainRules(3)).tokens) == 3


@needs_torch
def test_a_training_that_is_over_is_only_reported(
    target: Path, prompts: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    """The same command again writes the same head; other settings are refused by name."""
    folder, report = trained
    before = names_and_bytes(folder)
    result = run_here("train-drafter", target, "--out", folder, "--prompts", prompts, *OPTIONS)
    assert result.code == 0, result
    assert report["sentence"][:30] in result.text
    assert names_and_bytes(folder)["model.safetensors"] == before["model.safetensors"]
    refused = run_here("train-drafter", target, "--out", folder, "--prompts", prompts, *OPTIONS, "--seed", "8")
    assert refused.code == RequestError.exit_code
    assert "seed 0 instead of 8" in refused.err


@needs_torch
def test_ten_kills_change_nothing(
    target: Path, prompts: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Killed at ten random moments, the command ends with the bits of the run that nothing disturbed."""
    whole, _ = trained
    training = Training(model=target, out=tmp_path / "head", prompts=prompts)
    draw, died_in = Random(11), []
    for part, n_kills, most_s in (("collecting", 5, 0.6), ("learning", 3, 0.4), ("writing", 2, 0.0)):
        for _ in range(n_kills):
            died_in.append(kill(training, part, after_s=draw.uniform(0, most_s), files=draw.randrange(4)))
    assert len([part for part in died_in if part]) >= 8, died_in
    assert "collecting" in died_in
    train(training)
    assert_array_equal(load_head(training.out).d2t, load_head(whole).d2t)
    ours, theirs = names_and_bytes(training.out), names_and_bytes(whole)
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    assert ours.keys() == theirs.keys()
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".lock", ".tmp")]
    assert left == []


def trained_on(
    trained: tuple[Path, dict[str, Any]], out: Path, target: Path, prompts: Path, *asked: str
) -> tuple[Path, dict[str, Any]]:
    """Train a drafter of another kind on the answers that are there already; return it with the command's report."""
    places = ("--out", out, "--work", trained[0].with_name("head.training"), "--prompts", prompts)
    result = run_here("train-drafter", target, *places, *asked, *OPTIONS, "--json", "-q")
    assert (result.code, result.err) == (0, ""), result
    return out, json.loads(result.out)


@pytest.fixture(scope="module")
def narrow(
    target: Path, prompts: Path, trained: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A draft model that one run trained."""
    return trained_on(trained, tmp_path_factory.mktemp("narrow") / "draft.gguf", target, prompts, "--kind", "model")


@needs_torch
def test_a_draft_model_comes_out(target: Path, narrow: tuple[Path, dict[str, Any]]) -> None:
    """Its file and the report agree."""
    out, report = narrow
    assert report["sentence"].startswith("the draft model gives ")
    assert (report["kind"], report["out"], report["vocabulary"]) == ("model", str(out), 64)
    about = json.loads(str(read_gguf(out).metadata["edgedec.draft_model"]))["about"]
    assert about["report"]["pays"] == report["pays"]


@pytest.fixture(scope="module")
def block(
    target: Path, prompts: Path, trained: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A block drafter that one run trained."""
    asked = ("--kind", "block", "--block", "4", "--rank", "8")
    return trained_on(trained, tmp_path_factory.mktemp("block") / "head", target, prompts, *asked)


@needs_torch
def test_a_block_drafter_comes_out(target: Path, block: tuple[Path, dict[str, Any]]) -> None:
    """It reads back as it was asked for, fits its target, and promises what the report says."""
    folder, report = block
    head = load_head(folder)
    assert fit(head, read_gguf(target)).notes == ()
    assert head.card.block == BlockShape(2, 4, shifted=True, causal=True, markov="vanilla", rank=8)
    assert (head.card.taps, head.card.n_vocab_draft) == ((2, 3, 4), 64)
    assert head.card.promise is not None
    assert len(head.card.promise.reach) == 4
    assert [round(chance, 4) for chance in head.card.promise.reach] == report["kinds"]["all"]["reach"]
    assert report["sentence"].startswith("the block drafter gives ")
    assert report["draft"] > report["drafted_token"] > 0
    table = head.tensors["markov_w1"].floats()
    strange = np.setdiff1d(np.arange(len(table)), head.d2t)
    assert (table[strange] == table[strange[0]]).all(), "tokens that it can't draft share a row"


@needs_torch
@pytest.mark.parametrize(("runtime", "draft"), [("cpu", "model"), ("cpu", "head"), ("llamacpp", "model")])
def test_what_was_trained_drafts(
    target: Path, narrow: tuple[Path, dict[str, Any]], block: tuple[Path, dict[str, Any]], runtime: str, draft: str
) -> None:
    """The text stays the same; a draft model shares the target's tokens, so it drafts tokens, not text."""
    if runtime == "llamacpp":
        pytest.importorskip("llama_cpp")
    given: dict[str, Any] = {"draft_model": narrow[0]} if draft == "model" else {"draft_head": block[0]}
    with edgedec.load(target, runtime=runtime, draft="off", n_ctx=256) as engine:
        plain = engine.generate("some words", max_tokens=24, temperature=0)
    with edgedec.load(target, runtime=runtime, draft=draft, n_ctx=256, **given) as engine:
        drafted = engine.generate("some words", max_tokens=24, temperature=0)
    assert drafted.token_ids == plain.token_ids
    assert runtime == "llamacpp" or drafted.stats.drafters[draft]["nodes"] > 0


@needs_torch
def test_kills_change_nothing_of_a_block_drafter(
    target: Path, prompts: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Killed while it learns, the command ends with the bits of a run that nothing disturbed."""
    lessons, folders = trained[0].with_name("head.training") / "lessons", (tmp_path / "whole", tmp_path / "torn")
    for folder in folders:
        shutil.copytree(lessons, folder / "work" / "lessons")
    whole, torn = (
        Training(model=target, out=folder / "head", prompts=prompts, kind="block", work=folder / "work")
        for folder in folders
    )
    train(whole)
    draw = Random(4)
    assert "learning" in [kill(torn, "learning", after_s=draw.uniform(0, 0.4)) for _ in range(4)]
    train(torn)
    ours, theirs = names_and_bytes(torn.out), names_and_bytes(whole.out)
    assert ours["model.safetensors"] == theirs["model.safetensors"]


@needs_torch
def test_kills_change_nothing_of_a_draft_model(
    target: Path,
    prompts: Path,
    narrow: tuple[Path, dict[str, Any]],
    trained: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Killed while it learns, the command ends with the tensors of the run that nothing disturbed."""
    work, out = tmp_path / "work", tmp_path / "draft.gguf"
    shutil.copytree(trained[0].with_name("head.training") / "lessons", work / "lessons")
    training = Training(model=target, out=out, prompts=prompts, kind="model", work=work)
    draw = Random(3)
    assert "learning" in [kill(training, "learning", after_s=draw.uniform(0, 0.4)) for _ in range(4)]
    train(training)
    ours, theirs = read_gguf(out), read_gguf(narrow[0])
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(ours.read_tensor_bytes(name) == theirs.read_tensor_bytes(name) for name in ours.tensors)


@needs_torch
def test_another_shape_does_not_go_on_with_a_checkpoint(
    target: Path, prompts: Path, narrow: tuple[Path, dict[str, Any]], trained: tuple[Path, dict[str, Any]]
) -> None:
    """It is refused, with what to delete."""
    work = trained[0].with_name("head.training")
    asked = ("--kind", "model", "--layers", "2", "--work", work, "--prompts", prompts, *OPTIONS)
    result = run_here("train-drafter", target, "--out", narrow[0], *asked)
    assert result.code == RequestError.exit_code
    assert "checkpoint-model.pt is of a training with other settings; delete it" in result.err


def test_without_torch_the_command_says_how_to_get_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work; nothing is written."""
    monkeypatch.setattr("edgedec_export.training.kinds.find_spec", lambda name: None)
    result = run_here("train-drafter", target, "--out", tmp_path / "head")
    assert result.code == RuntimeUnavailableError.exit_code
    assert "training a head needs torch, which is not installed: pip install" in result.err
    on_linux = "--index-url https://download.pytorch.org/whl/cpu\n" in result.err
    assert on_linux == (sys.platform == "linux"), "elsewhere the package is for processors already"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "0"), "--tokens is 0; it must be from 1 to"),
        (
            ("--tokens", "4000", "--answer-tokens", "23"),
            "--tokens is 4000; it must be from 4049, as answers may have 23",
        ),
        (("--passes", "nan"), "--passes is nan; it must be from 0.01"),
        (("--vocabulary", "3"), "--vocabulary is 3; it must be from 16"),
        (("--prompts", "missing.txt"), "missing.txt can't be read"),
        (
            ("--layers", "2"),
            "--layers is 2; a drafter of the kind head has no such choice, only the kinds block and mo",
        ),
        (("--rank", "64"), "--rank is 64; a drafter of the kind head has no such choice, only the kinds block"),
        (("--kind", "model", "--block", "6"), "--block is 6; a drafter of the kind model has no such choice"),
        (("--kind", "block", "--width", "32"), "--width is 32; a drafter of the kind block has no such choice"),
        (("--kind", "block", "--block", "17"), "--block is 17; it must be from 2 to 16"),
        (("--kind", "block", "--layers", "0"), "--layers is 0; it must be from 1 to 8"),
        (("--kind", "block", "--rank", "1025"), "--rank is 1025; it must be from 1 to 1024"),
        (("--kind", "model", "--width", "33"), "--width is 33; it must be a multiple of 32"),
        (("--kind", "model", "--layers", "8"), "--layers is 8; it must be from 1 to the target's 7"),
    ],
)
def test_options_that_cannot_be(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    """Each is refused by name, before any work."""
    monkeypatch.setattr("edgedec_export.training.kinds.find_spec", lambda name: object())
    result = run_here("train-drafter", target, "--out", tmp_path / "head", *options)
    assert result.code in (RequestError.exit_code, 60)
    assert message in result.err
    assert list(tmp_path.iterdir()) == []
