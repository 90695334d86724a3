"""Window-Diffusion: what stands around a block keeps the keys and values of the block's first pass."""

from pathlib import Path

import pytest
from support.decoding.laid_out import check
from support.decoding.plain_denoising import FORMS, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import OptionError
from edgedec_methods.diffusion.rules import Canvas
from edgedec_methods.diffusion.window import window


@pytest.mark.parametrize(("n_passes", "kept"), [(0, []), (1, [1, 0, 5]), (31, [1, 0, 5]), (32, []), (33, [1, 0, 5])])
def test_what_stands_around_a_block_is_evaluated_in_every_32nd_pass(n_passes: int, kept: list[int]) -> None:
    """The block in each; what is further behind than the number says, never."""
    canvas = Canvas(range(9), 2, 5, (4,), frozenset({4}), n_passes, held=(1, 0, 2, 3, 4, 5))
    found, fresh = window(1)(canvas)
    assert (found, fresh) == (
        kept,
        [place for place in range(6) if place not in kept and not 2 <= place < 5] + [2, 3, 4],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n_behind", "shift"), [(5, False), (0, True)])
def test_texts_are_those_of_a_plain_table(tmp_path: Path, n_behind: int, shift: bool) -> None:
    """Only as many masked positions behind the block are seen."""
    check(tmp_path, f"window:{n_behind}", lambda place, i, age: i > 0 and age > i, n_behind, shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_layouts_are_for_whole_texts(tmp_path: Path, form: str) -> None:
    """A model of blocks has one already; a rule comes first, and is one."""
    path, wrong = write_model(tmp_path / "m.gguf", form), ["window", "threshold,credit", "threshold,window:x"]
    for rule in [*wrong, *(["threshold,window"] if form != "whole" else [])]:
        with pytest.raises(OptionError, match="denoise"):
            edgedec.load(path, runtime="cpu", lossy=Lossy(methods={"diffusion": {"denoise": rule}}))
