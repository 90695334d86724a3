"""A context that is longer than what a model was trained for is told: at load, with each text, and in plans."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.models.gguf_writer import tiny_text_model, write_gguf
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_info import context_note, describe, trained_context

NOTE = (
    "the context of 300 tokens is longer than the 256 that the model was trained for: text beyond them tends to be poor"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that was trained on 256 tokens."""
    return tiny_llama(tmp_path / "m.gguf", n_ctx_train=256)


@pytest.mark.parametrize("runtime", ["cpu", "reference"])
def test_it_is_warned_of_at_load_and_told_with_each_text(
    model: Path, runtime: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is made all the same; a context that was trained for, and the default one, say nothing."""
    for n_ctx, notes in ((300, [NOTE]), (256, []), (None, [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "edgedec.api.load"):
            engine = edgedec.load(model, runtime=runtime, n_ctx=n_ctx, draft="off")
        assert caplog.messages == notes
        with engine:
            for _ in range(2):
                assert engine.generate("a", max_tokens=2).stats.notes == notes


def test_the_small_model_of_a_pair_counts_too(tmp_path: Path) -> None:
    """Both write in the same context."""
    large = tiny_llama(tmp_path / "large.gguf", n_ctx_train=512)
    small = tiny_llama(tmp_path / "small.gguf", n_ctx_train=256, seed=1)
    lossy = edgedec.Lossy(methods={"switching": {"small_model": small, "entropy": 0.1}})
    with edgedec.load(large, runtime="reference", n_ctx=300, lossy=lossy) as engine:
        assert engine.generate("a", max_tokens=2).stats.notes[0] == NOTE.replace("the model", "the small model")


def test_the_command_line_and_plans_say_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once on standard error when the model is loaded, quiet or not at all with -q; as a note of the plan."""
    monkeypatch.setenv("EDGEDEC_DRAFT", "off")
    shared = (model, "--runtime", "reference", "-c", "300")
    found = run_here("run", *shared, "hi", "-n", "1", "--raw")
    assert found.code == 0
    assert f"edgedec: {NOTE}\n" in found.err
    assert run_here("run", *shared, "hi", "-n", "1", "--raw", "-q").err == ""
    assert json.loads(run_here("plan", *shared, "--json").out)["notes"] == [NOTE]
    assert NOTE in run_here("plan", *shared).text


def test_a_file_without_the_usual_ending_has_its_trained_context(model: Path) -> None:
    """Such as those that ollama keeps: their default context is the trained one, and a longer one is told."""
    blob = model.rename(model.with_name("sha256-0123"))
    assert trained_context(blob) == 256
    with edgedec.load(blob, runtime="reference", draft="off") as engine:
        assert engine.n_ctx == 256
    assert context_note(blob, 300) == NOTE


@pytest.mark.parametrize(
    ("scaling", "n_scaled"),
    [
        ({}, 128),
        ({"type": "none", "factor": 4.0}, 128),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, 512),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, 128),
        ({"type": "linear", "factor": 0.5}, 128),
    ],
)
def test_scaled_positions_count(tmp_path: Path, scaling: dict[str, Any], n_scaled: int) -> None:
    """A length that the metadata scales to is meant to work; some files name the scaled length as the trained one."""
    metadata, tensors = tiny_text_model()
    metadata |= {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    info = describe(read_gguf(path))
    assert (info.n_ctx_train, info.n_ctx_scaled) == (128, n_scaled)
    assert context_note(path, n_scaled) == ""
    assert f"longer than the {n_scaled} that" in context_note(path, n_scaled + 1)


def test_a_file_that_says_nothing_is_told_nothing(tmp_path: Path) -> None:
    """Neither is one that is no model: its runtime says what is wrong."""
    (tmp_path / "x.gguf").write_bytes(b"no model")
    assert context_note(tmp_path / "x.gguf", 1 << 20) == ""
    assert trained_context(tmp_path / "nowhere") == 0
