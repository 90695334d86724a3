"""Presets: their files say what was saved, damaged ones are refused by name, and nothing lies outside the folder."""

import os
import random
from dataclasses import fields
from pathlib import Path

import pytest

from edgedec.errors import ModelFormatError, RequestError, StorageError
from edgedec_models.presets import (
    MOST_BYTES,
    Preset,
    find_preset,
    has_preset,
    list_presets,
    presets_folder,
    remove_preset,
    save_preset,
)

FULL = Preset(
    "poet",
    "hf:o/r:Q4_0",
    system='He said "é\\n\u2028", \x7f\x00 then\r\nleft.',
    template="{{ messages[0]['content'] }}\t{# x #}",
    draft_head="off",
    lora="/models/tone of mine.gguf=0.5\n/models/b.gguf",
    options={"temperature": 1e-05, "top_k": 5, "ignore_end": True, "stop": ("a\n", '"'), "n_ctx": 64, "top_p": 1.0},
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of its own for each test."""
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path))
    return tmp_path


def test_what_is_saved_is_found() -> None:
    """Every text and option comes back; the file is its owner's alone; a second save replaces the first."""
    assert (find_preset("poet"), list_presets(), has_preset("poet"), remove_preset("poet")) == (None, [], False, False)
    path = save_preset(FULL)
    found = find_preset("poet")
    assert found is not None
    texts = [each.name for each in fields(Preset) if each.name != "options"]
    assert all(getattr(FULL, name) for name in texts)
    assert [getattr(found, name) for name in texts] == [getattr(FULL, name) for name in texts]
    assert (found.sampling, found.n_ctx) == (FULL.sampling, 64)
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
    save_preset(Preset("poet", "tiny"))
    save_preset(Preset("ape", "tiny"))
    assert list_presets() == [Preset("ape", "tiny"), Preset("poet", "tiny")]
    assert remove_preset("poet")
    assert [preset.name for preset in list_presets()] == ["ape"]


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\\b", "c:d", "x" * 201, "a\0b"])
def test_a_name_is_no_path(name: str) -> None:
    """A name with separators, a drive or a leading dot makes, finds and deletes nothing."""
    with pytest.raises(RequestError, match="is no name for a preset"):
        Preset(name, "tiny")
    assert (find_preset(name), has_preset(name), remove_preset(name)) == (None, False, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1}, "'temprature' is no option of a preset"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_ctx": True}, "n_ctx is True"),
        ({"logit_bias": {}}, "'logit_bias' is no option of a preset"),
    ],
)
def test_options_are_checked(options: dict[str, object], words: str) -> None:
    """An option that is unknown, or out of range, is refused when the preset is made."""
    with pytest.raises(RequestError, match=words):
        Preset("x", "tiny", options=options)


def test_texts_that_can_not_be_kept() -> None:
    """A text that is too long, or no Unicode, is refused, and leaves no file."""
    for text, words in (("x" * MOST_BYTES, "it may have"), ("\ud800", "no Unicode")):
        with pytest.raises(RequestError, match=words):
            save_preset(Preset("x", "tiny", system=text))
    assert list(presets_folder().glob("*")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no model"),
        ("model = 5", "model must be a string"),
        ('model = "m"\nsistem = "x"', "'sistem' is not known"),
        ('model = "m"\noptions = 1', "options must be a table"),
        ('model = "m"\n[options]\ntop_p = 7', "top_p is 7"),
        ('model = "m', "can't be used"),
        ("a = " + "[" * 5000, "can't be used"),
    ],
)
def test_a_damaged_file_is_named(text: str, words: str) -> None:
    """The message has the path and what is wrong; the list goes on without the file, and it can be deleted."""
    presets_folder().mkdir()
    path = presets_folder() / "x.toml"
    path.write_text(text)
    with pytest.raises(ModelFormatError, match=words) as caught:
        find_preset("x")
    assert str(path) in str(caught.value)
    assert list_presets() == []
    assert remove_preset("x")


def test_a_file_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that names it, and the list goes on without it."""
    paths = {name: save_preset(Preset(name, "tiny")) for name in ("ape", "poet")}
    read = Path.read_bytes

    def reading(path: Path) -> bytes:
        if path == paths["ape"]:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", reading)
    with pytest.raises(StorageError, match=r"ape\.toml: .*; .* for presets EDGEDEC_CONFIG"):
        find_preset("ape")
    assert [preset.name for preset in list_presets()] == ["poet"]


@pytest.mark.slow
def test_files_with_wrong_bytes() -> None:
    """However a file is damaged, it is a preset or refused."""
    path = save_preset(FULL)
    data, rng = path.read_bytes(), random.Random(5)
    n_refused = 0
    for _ in range(400):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(mutant))
            mutant[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        path.write_bytes(mutant)
        try:
            assert isinstance(find_preset("poet"), Preset)
        except ModelFormatError:
            n_refused += 1
    assert n_refused > 100
