"""The files around a training: heads that are written, the recipe that is kept, the user's prompts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgedec.errors import EdgedecError, ModelFormatError, RequestError, StorageError
from edgedec.gguf.file import read_gguf
from edgedec_export.training import recipe
from edgedec_export.training.head_folder import write_head
from edgedec_export.training.lessons.openings import Opening
from edgedec_export.training.lessons.prompt_files import read_prompts
from edgedec_export.training.recipe import Recipe
from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.trained_heads.card import Promise
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.shapes import expected_shapes
from edgedec_runtimes.trained_heads.target import fit, target_of

RECIPE = Recipe("0123", (2, 3, 4), 256, 1024, 0)


def test_a_head_is_read_as_it_was_written(target: Path, tmp_path: Path) -> None:
    """Its card, its tensors (matrices as float16), its vocabulary; and it fits its target without a note."""
    gguf = read_gguf(target)
    promise = Promise((0.5, 0.25), {"chat": (0.5, 0.125)})
    card = replace(card_of(TargetParts.of(gguf), "head", 20, target_of(gguf)), promise=promise)
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(shape, np.float32) for name, shape in expected_shapes(card, n_taps=3).items()}
    token_ids = np.sort(rng.choice(card.n_vocab_target, 20, replace=False)).astype(np.int32)
    folder = tmp_path / "a" / "head"
    write_head(folder, card, arrays, token_ids, {"recipe": 1})
    for _ in range(2):  # again over the first
        write_head(folder, card, arrays, token_ids, {"recipe": 1})
    found = load_head(folder)
    assert found.card == card
    assert_array_equal(found.d2t, token_ids)
    for name, array in arrays.items():
        expected = array.astype(np.float16).astype(np.float32) if array.ndim == 2 else array
        assert_array_equal(found.tensors[name].floats(), expected)
    assert fit(found, gguf).notes == ()


def test_the_recipe_is_kept_and_another_one_is_refused(tmp_path: Path) -> None:
    """The message names what differs."""
    folder = tmp_path / "work"
    for _ in range(2):
        recipe.keep(folder, RECIPE)
    with pytest.raises(RequestError, match=r"seed 0 instead of 1.*\(work\)"):
        recipe.keep(folder, replace(RECIPE, n_answer=256, seed=1))
    for damaged in (b"", b"{", b"[]", b"\xff"):
        (folder / recipe.FILE).write_bytes(damaged)
        with pytest.raises(ModelFormatError, match="delete its folder to begin anew"):
            recipe.keep(folder, RECIPE)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        recipe.keep(tmp_path / "file", RECIPE)


def test_prompts_of_a_user(tmp_path: Path) -> None:
    """Lines of text, or JSON lines; each prompt counts once."""
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\n  two  \none\n", encoding="utf-8-sig")
    objects = [{"turns": ["three\nlines", "x"], "task": "chat"}, {"prompt": "two"}, {"prompt": "four", "id": 3}]
    lines.write_text("\n".join(map(json.dumps, objects)), encoding="utf-8")
    assert read_prompts([text, lines]) == (
        Opening("own", "one", is_whole=True),
        Opening("own", "two", is_whole=True),
        Opening("chat", "three\nlines", is_whole=True),
        Opening("own", "four", is_whole=True),
    )
    assert read_prompts([]) == ()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b"[]", "line 1: expected a JSON object"),
        ("a.jsonl", b'{"turns": "x"}', "line 1: expected a JSON object"),
        ("a.jsonl", b'{"turns": ["x"]}\n{"turns": [7]}', "line 2: expected a JSON object"),
        ("a.jsonl", b'{"prompt": "x", "task": 3}', "line 1: expected a JSON object"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "lone surrogate"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    """The message names the file and the line."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(RequestError, match=message):
        read_prompts([path])
    with pytest.raises(StorageError, match="can't be read"):
        read_prompts([tmp_path / "missing.txt"])


@pytest.mark.slow
def test_any_bytes_are_prompts_or_refused(tmp_path: Path) -> None:
    """Mutations of a sound file of JSON lines never crash."""
    sound = b'{"turns": ["a prompt", "b"], "task": "chat"}\n{"prompt": "another"}\n'
    rng = np.random.default_rng(5)
    path = tmp_path / "a.jsonl"
    n_read = 0
    for case in range(300):
        data = bytearray(sound)
        data[rng.integers(len(data))] = int(rng.integers(0, 256))
        if case % 4 == 0:
            del data[rng.integers(len(data)) :]
        path.write_bytes(data)
        try:
            n_read += len(read_prompts([path])) > 0
        except EdgedecError:
            continue
    assert 20 < n_read < 280
