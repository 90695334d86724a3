"""How pictures are cut: sizes, tiles and marks, as libmtmd makes them."""

import random
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_projectors import tiny_projector

from edgedec.errors import RequestError
from edgedec.gguf.file import read_gguf
from edgedec.pictures import Block
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.siglip_file import siglip_file
from edgedec_runtimes.pictures.siglip_layout import KINDS, Cutting, cut_of, layout_of, tiles_of

SMOLVLM = Cutting("idefics3", 512, 16, 4, 2048)
LFM2 = Cutting("lfm2", 256, 16, 2)
GEMMA3 = Cutting("gemma3", 896, 14, 4)


@pytest.mark.parametrize(
    ("cutting", "size", "n_rows"),
    [
        (SMOLVLM, (1024, 768), 832),
        (SMOLVLM, (512, 512), 17 * 64),
        (LFM2, (200, 150), 70),
        (LFM2, (512, 512), 256),
        (LFM2, (640, 480), 234),
        (LFM2, (1024, 768), 1770),
        (LFM2, (4000, 3000), 1770),
        (GEMMA3, (200, 150), 256),
    ],
)
def test_a_picture_becomes_as_many_rows_as_with_llama_cpp(cutting: Cutting, size: tuple[int, int], n_rows: int) -> None:
    assert layout_of(cutting, *size).n_rows == n_rows


def test_a_limit_of_rows_makes_fewer_tiles() -> None:
    layout = layout_of(Cutting("idefics3", 512, 16, 4, 2048, 64), 1024, 1024)
    assert [block.n_rows for block in layout.blocks] == [64, 64]


def test_marks_stand_around_tiles() -> None:
    parts = layout_of(Cutting("idefics3", 512, 16, 4, 1024), 1024, 1000).parts
    assert parts == (
        "<fake_token_around_image><row_1_col_1>",
        0,
        "<fake_token_around_image><row_1_col_2>",
        1,
        "\n<fake_token_around_image><row_2_col_1>",
        2,
        "<fake_token_around_image><row_2_col_2>",
        3,
        "\n\n<fake_token_around_image><global-img>",
        4,
        "<fake_token_around_image>",
    )
    assert layout_of(LFM2, 64, 64).parts == ("<|image_start|>", 0, "<|image_end|>")
    assert layout_of(LFM2, 1024, 1024).parts[-3:] == ("<|img_thumbnail|>", 4, "<|image_end|>")


def test_only_rows_of_gemma3_see_each_other() -> None:
    assert layout_of(GEMMA3, 9, 9).blocks == (Block(256, 256, 1, True),)
    assert not any(block.mutual for block in layout_of(LFM2, 900, 900).blocks)


def test_a_picture_that_leaves_no_pixel_is_refused() -> None:
    with pytest.raises(RequestError, match="10000 x 1 pixels can't be cut"):
        layout_of(Cutting("idefics3", 512, 16, 4, 512), 10_000, 1)


def test_tiles_have_the_pixels_of_their_place() -> None:
    """Each quarter has one grey: no tile shows another quarter's, and the overview shows all four."""
    grey = np.repeat(np.repeat(np.array([[10, 60], [110, 160]], np.uint8), 64, 0), 64, 1)
    picture = Picture(128, 128, np.repeat(grey[:, :, None], 3, 2).tobytes())
    tiles = [np.asarray(tile) for tile in tiles_of(Cutting("idefics3", 64, 8, 4, 128), picture)]
    assert [(tile.min(), tile.max()) for tile in tiles[:4]] == [(10, 10), (60, 60), (110, 110), (160, 160)]
    assert tiles[4][::63, ::63, 0].tolist() == [[10, 60], [110, 160]]


def test_a_picture_of_another_ratio_stands_on_black() -> None:
    (tile,) = tiles_of(Cutting("gemma3", 64, 8, 4), Picture(10, 20, bytes([200]) * 600))
    columns = np.asarray(tile)[:, :, 0].max(0)
    assert columns.tolist() == [0] * 16 + [200] * 32 + [0] * 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_are_those_of_libmtmd(kind: str, tmp_path: Path) -> None:
    from edgedec_runtimes.pictures.header import opening
    from edgedec_runtimes.pictures.mtmd import Mtmd

    path = tiny_projector(tmp_path / f"{kind}.gguf", kind)
    header, rng = read_projector(path), random.Random(1)
    sizes = [(13 * k, 12 * k) for k in range(5, 150, 10)]  # between two ratios of tiles
    sizes += [(rng.randint(1, most), rng.randint(1, most)) for most in (40, 300, 4000) for _ in range(60)]
    for max_tokens in (None, 64, 100):
        file = siglip_file(read_gguf(path), kind, header.n_embd, max_tokens)
        assert file is not None
        theirs = Mtmd(opening(header, "llama", 1, max_tokens))
        for width, height in sizes:
            if max(width, height) <= 64 * min(width, height):
                assert layout_of(file.cutting, width, height) == theirs.layout(width, height)
        theirs.close()


def test_sizes_are_multiples_of_what_becomes_a_row() -> None:
    rng = random.Random(2)
    for _ in range(300):
        width, height = rng.randint(1, 5000), rng.randint(1, 5000)
        whole = cut_of(LFM2, width, height).whole
        assert whole[0] % 32 == 0 == whole[1] % 32
        assert whole[0] * whole[1] <= 256 * 32 * 32 or min(whole) == 32
