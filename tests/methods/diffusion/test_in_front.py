"""A causal model denoises as a plain form does that puts tokens in front of masks and evaluates everything."""

from pathlib import Path

import pytest
from support.decoding.plain_denoising import write_model

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import read_gguf
from edgedec_methods.diffusion.in_front import in_front
from edgedec_methods.diffusion.rules import Canvas
from edgedec_runtimes.shared.denoising import denoising

pytestmark = pytest.mark.slow


def test_tokens_stand_in_front_of_masks() -> None:
    """Those before the first mask need no forward, where no row of theirs is wanted."""
    ids = [5, 6, 7, 0, 8, 0, 9, 0]
    assert in_front(Canvas(ids, 2, 8, [3, 5, 7], frozenset({3, 5, 7}), 1, [])) == ([0, 1, 2], [4, 6, 3, 5, 7])
    assert in_front(Canvas(ids, 2, 8, [3, 5, 7], frozenset({2, 4, 6}), 1, [])) == ([0, 1], [2, 4, 6, 3, 5, 7])


def test_a_file_says_one_form(tmp_path: Path) -> None:
    """A block and a window are refused together."""
    path = write_model(tmp_path / "m.gguf", "blocks", **{"diffusion.window_size": 8})
    gguf = read_gguf(path)
    with pytest.raises(ModelFormatError, match=r"diffusion\.window_size"):
        denoising(gguf)
