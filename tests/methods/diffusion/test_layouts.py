"""What a pass over a block evaluates: tokens in front of masks, and whose keys and values are left as they are."""

from pathlib import Path

import pytest
from support.decoding.laid_out import N, check
from support.decoding.plain_denoising import FORMS, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import ModelFormatError, OptionError
from edgedec.gguf.file import read_gguf
from edgedec_methods.diffusion.delayed import delayed
from edgedec_methods.diffusion.in_front import in_front
from edgedec_methods.diffusion.rules import Canvas
from edgedec_methods.diffusion.window import window
from edgedec_runtimes.shared.denoising import denoising


@pytest.mark.parametrize(("n_passes", "kept"), [(0, []), (1, [1, 0, 2]), (2, [1, 0, 2]), (3, [])])
def test_delayed_evaluates_masks_in_each_pass_and_settled_tokens_in_every_third(n_passes: int, kept: list[int]) -> None:
    """Positions behind the block are masks, too, though the pass before has left their keys and values."""
    canvas = Canvas(range(7), 2, 5, (4,), frozenset({4}), n_passes, held=(1, 0, 2, 4, 5, 6))
    assert delayed(canvas, 3) == (kept, [place for place in range(7) if place not in kept])


@pytest.mark.parametrize(("n_passes", "kept"), [(0, []), (1, [1, 0, 5]), (31, [1, 0, 5]), (32, []), (33, [1, 0, 5])])
def test_a_window_evaluates_what_stands_around_a_block_in_every_32nd_pass(n_passes: int, kept: list[int]) -> None:
    """The block in each; what is further behind than the number says, never."""
    canvas = Canvas(range(9), 2, 5, (4,), frozenset({4}), n_passes, held=(1, 0, 2, 3, 4, 5))
    fresh = [place for place in range(6) if place not in kept and not 2 <= place < 5]
    assert window(canvas, 1) == (kept, [*fresh, 2, 3, 4])


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True])
def test_texts_of_delayed_are_those_of_a_plain_table(tmp_path: Path, shift: bool) -> None:
    """Every third pass evaluates everything."""
    check(tmp_path, "delayed:3", lambda place, i, age: i % 3 > 0 and age > 1, N, shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize(("n_behind", "shift"), [(5, False), (0, True)])
def test_texts_of_a_window_are_those_of_a_plain_table(tmp_path: Path, n_behind: int, shift: bool) -> None:
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


@pytest.mark.parametrize(
    ("wanted", "placed"), [({3, 5, 7}, ([0, 1, 2], [4, 6, 3, 5, 7])), ({2, 4, 6}, ([0, 1], [2, 4, 6, 3, 5, 7]))]
)
def test_tokens_stand_in_front_of_masks(wanted: set[int], placed: tuple[list[int], list[int]]) -> None:
    """Those before the first mask need no forward, where no row of theirs is wanted."""
    assert in_front(Canvas([5, 6, 7, 0, 8, 0, 9, 0], 2, 8, [3, 5, 7], frozenset(wanted), 1, [])) == placed


@pytest.mark.slow
def test_a_file_says_one_form(tmp_path: Path) -> None:
    """A block and a window are refused together."""
    path = write_model(tmp_path / "m.gguf", "blocks", **{"diffusion.window_size": 8})
    with pytest.raises(ModelFormatError, match=r"diffusion\.window_size"):
        denoising(read_gguf(path))
