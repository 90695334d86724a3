"""Answers that a server keeps for `edgedec learn --head`: only where it was asked to, and exactly."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_t5 import TinyT5
from support.models.tiny_t5_onnx import write_texts
from support.processes.command_line import run_here
from support.processes.running_server import CHAT, messages, started

from edgedec.errors import ModelFormatError, RequestError, UnsupportedModelError
from edgedec_apps import kept_answers
from edgedec_apps.kept_answers import answers_file, keep_answer, read_answers, snapshot
from edgedec_export.training.train_drafter import LearnedHead
from edgedec_models.model_heads import go_back, take_head


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model in a folder of its own."""
    (tmp_path / "models").mkdir()
    return tiny_llama(tmp_path / "models" / "tiny.gguf", chat_template=CHAT, n_ctx_train=512)


def kept(cache: Path, model: Path) -> list[list[int]]:
    """Return the texts that are kept."""
    return [text.tolist() for text in read_answers(answers_file(cache, model))]


def test_answers_come_back(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt loses its beginning, a long answer its end, and the oldest answers go first."""
    assert kept(cache, model) == []
    keep_answer(cache, model, (1, 2, 3), [4, 5])
    keep_answer(cache, model, (1, -1), [4])  # a picture's row
    keep_answer(cache, model, (1,), [])
    assert kept(cache, model) == [[3, 1, 2, 3, 4, 5]]
    assert answers_file(cache, model).stat().st_mode & 0o077 == 0
    keep_answer(cache, model, (7, *[8] * 512), [9] * 513)
    assert kept(cache, model)[1] == [512, *[8] * 512, *[9] * 512]
    monkeypatch.setattr(kept_answers, "_MOST_TOKENS", 1032)
    keep_answer(cache, model, (1,), [2])
    assert [len(text) for text in kept(cache, model)] == [1025, 3]


def test_what_is_no_file_of_the_model_is_refused(cache: Path, model: Path, tmp_path: Path) -> None:
    """A file that was cut, or is of a model of another vocabulary, by name; adding to it changes nothing."""
    path, other = answers_file(cache, model), tiny_llama(tmp_path / "other.gguf", n_vocab=300)
    keep_answer(cache, other, (1, 2), [299])
    whole = answers_file(cache, other).read_bytes()
    for data in (whole, whole[:-1], whole[:9]):
        path.write_bytes(data)
        with pytest.raises(
            ModelFormatError,
            match=f"{path.name} is damaged, or of another model; edgedec learn --head",
        ):
            read_answers(path)
        keep_answer(cache, model, (1,), [2])
        assert path.read_bytes() == data


def test_folders_that_name_no_weights_share_no_file(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No head can learn for them: nothing is kept, as is said."""
    write_texts(tmp_path, TinyT5())
    for name in ("encoder_model.onnx", "decoder_model_merged.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedModelError, match=r"by a hash which weights it holds.* serve a GGUF"):
        answers_file(cache, tmp_path)
    keep_answer(cache, tmp_path, (1, 2), [3])
    assert "an answer could not be kept" in caplog.text
    assert not (cache / "answers").exists()


def test_a_head_learns_from_the_answers_of_its_beginning(cache: Path, model: Path) -> None:
    """What a server adds meanwhile is for the next time."""
    keep_answer(cache, model, (1,), [2, 3])
    first = snapshot(answers_file(cache, model))
    keep_answer(cache, model, (4,), [5, 6])
    assert snapshot(answers_file(cache, model)) == first == ([array("i", [1, 1, 2, 3])], first[1])


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_only_a_server_that_was_asked_to_keeps_answers(cache: Path, model: Path, *, keeps: bool) -> None:
    """The tokens of two texts of one prompt."""
    with started(model, keeps_answers=keeps) as server:
        body = {"messages": messages("x"), "max_tokens": 5, "temperature": 1, "n": 2, "seed": 3, "logprobs": True}
        reply = server.client.post("/v1/chat/completions", json=body).json()
        prompt = server.engine.chat_ids(messages("x"))
        tokens = [
            server.engine.samples(messages("x"), 2, max_tokens=5, temperature=1, seed=3)[k].token_ids for k in (0, 1)
        ]
    assert len(reply["choices"]) == 2
    assert kept(cache, model) == [[len(prompt), *prompt, *text] for text in tokens] * keeps
    assert (cache / "answers").exists() == keeps


@pytest.mark.slow
def test_answers_are_forgotten(cache: Path, model: Path, tmp_path: Path) -> None:
    """Those of one model with what learns of them, or all."""
    other = tiny_llama(tmp_path / "other.gguf", seed=1)
    for each in (model, other):
        keep_answer(cache, each, (1,), [2])
    work = snapshot(answers_file(cache, model))[1]
    snapshot(answers_file(cache, other))
    assert run_here("learn", "--head", model, "--forget").err == "1 file of answers forgotten\n"
    assert (work.exists(), kept(cache, model), kept(cache, other)) == (False, [], [[1, 1, 2]])
    assert json.loads(run_here("learn", "--forget", "--json").out) == {"forgotten": 1}
    assert list((cache / "answers").iterdir()) == []


@pytest.mark.parametrize("was_there", [b"old", b""])
def test_one_command_goes_back(cache: Path, model: Path, was_there: bytes) -> None:
    """To the head that was there before all learning, or to none."""
    place, new = model.with_name("tiny.head.gguf"), model.with_name("new")
    if was_there:
        place.write_bytes(was_there)
    for data in (b"first", b"second"):
        new.write_bytes(data)
        take_head(new, model)
        assert place.read_bytes() == data
    assert run_here("learn", "--head", model, "--back").err == f"the head of {model} is the one before all learning\n"
    assert (place.read_bytes() if place.exists() else b"") == was_there
    assert not place.with_name("tiny.head.gguf.before").exists()
    with pytest.raises(RequestError, match=r"no head of tiny has learned: there is no .*tiny\.head\.gguf\.before"):
        go_back(model)


@pytest.mark.parametrize(("after", "taken"), [(1.5, True), (1.75, True), (1.499, False)])
def test_a_head_is_taken_that_is_no_worse(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, after: float, *, taken: bool
) -> None:
    """Else nothing changes but that the work is over."""

    def learned(model: Path, texts: Any, work: Path, options: Any) -> LearnedHead:
        assert [text.tolist() for text in texts] == [[1, 1, 2]]
        (work / "new").write_bytes(b"new")
        return LearnedHead(work / "new", 1.5, after, 1234)

    monkeypatch.setattr("edgedec_export.training.train_drafter.learn_head", learned)
    keep_answer(cache, model, (1,), [2])
    document = json.loads(run_here("learn", "--head", model, "--json", "-q").out)
    assert document == {"taken": taken, "before": 1.5, "after": after, "tokens": 1234}
    assert model.with_name("tiny.head.gguf").exists() == taken
    assert not answers_file(cache, model).with_suffix(".learning").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--head", "m", "--back", "--forget"), "--head takes --back or --forget, and no files"),
        (("--head", "m", "--list"), "--head takes --back or --forget, and no files"),
        (("--head", "m", "file"), "--head takes --back or --forget, and no files"),
        (("--back",), "--back needs --head MODEL"),
    ],
)
def test_what_excludes_each_other_is_refused(words: tuple[str, ...], message: str) -> None:
    """Before a model is looked for."""
    result = run_here("learn", *words)
    assert (result.code, message in result.err) == (RequestError.exit_code, True), result
