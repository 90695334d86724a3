"""Our own picture encoder: how pictures are cut, its rows beside float64 and libmtmd, their bits, and what fails."""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.siglip_files import siglip_projector
from support.models.siglip_truth import true_rows
from support.models.tiny_projectors import tiny_projector

from edgedec.errors import CancelledError, ModelFormatError, RequestError, StorageError
from edgedec.gguf.file import read_gguf
from edgedec.pictures import Block
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.native_encoder import NativeEncoder, open_native
from edgedec_runtimes.pictures.siglip_file import siglip_file
from edgedec_runtimes.pictures.siglip_layout import KINDS as LAYOUT_KINDS
from edgedec_runtimes.pictures.siglip_layout import Cutting, cut_of, layout_of, tiles_of

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
@pytest.mark.parametrize("kind", LAYOUT_KINDS)
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


KINDS = ("gemma3", "idefics3", "lfm2")


def picture(width: int, height: int, seed: int = 0) -> Picture:
    return Picture(width, height, np.random.default_rng(seed).integers(0, 256, width * height * 3, np.uint8).tobytes())


def opened(path: Path, n_threads: int = 1) -> NativeEncoder:
    encoder = open_native(path, read_projector(path), n_threads)
    assert encoder is not None
    return encoder


def rows_of(path: Path, given: Picture, n_threads: int = 1) -> list[Any]:
    encoder = opened(path, n_threads)
    rows: list[Any] = encoder.encode(given)
    encoder.close()
    return rows


def distance(path: Path, kind: str, given: Picture, *, merge: int, n_head: int = 2, activation: str = "gelu") -> float:
    """Return how far the rows are from float64: the root mean square of the difference, over that of the rows."""
    header = read_projector(path)
    file = siglip_file(read_gguf(path), kind, header.n_embd, None)
    assert file is not None
    found = np.concatenate(rows_of(path, given))
    tiles = [np.asarray(tile) for tile in tiles_of(file.cutting, given)]
    truth = np.concatenate(
        [true_rows(path, kind, tile, merge=merge, n_head=n_head, activation=activation) for tile in tiles]
    )
    return float(np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "merge"), [("gemma3", 4), ("idefics3", 4), ("lfm2", 2)])
def test_rows_are_those_of_float64(kind: str, merge: int, tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "m.gguf", kind)
    assert distance(path, kind, picture(100, 40), merge=merge) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("type_name", "most"), [("F16", 2e-6), ("BF16", 2e-6), ("Q8_0", 5e-5)])
def test_every_tensor_type_is_close_to_float64(type_name: str, most: float, tmp_path: Path) -> None:
    """Rows of 320 are cut into pieces of 256 and 64 columns; the products of Q8_0 are made of 16 bits."""
    path = siglip_projector(tmp_path / "m.gguf", "idefics3", type_name, n_embd=64, n_ff=320, merge=2, n_out=40)
    assert distance(path, "idefics3", picture(64, 64), merge=2) < most


@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
def test_heads_of_72_and_rows_that_32_does_not_divide(type_name: str, tmp_path: Path) -> None:
    shape: dict[str, int] = {
        "n_embd": 144,
        "n_ff": 76,
        "n_layer": 1,
        "image_size": 56,
        "patch_size": 7,
        "merge": 2,
        "n_out": 33,
    }
    path = siglip_projector(tmp_path / "m.gguf", "gemma3", type_name, **shape)
    assert distance(path, "gemma3", picture(30, 50), merge=2) < 5e-5


@pytest.mark.parametrize("activation", ["silu", "gelu_quick"])
def test_other_activations(activation: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"clip.use_gelu": False, "clip.use_silu": activation == "silu"}
    path = siglip_projector(tmp_path / "m.gguf", "idefics3", more=more)
    assert distance(path, "idefics3", picture(64, 64), merge=4, activation=activation) < 2e-6


def test_files_of_old_converters_have_up_and_down_exchanged(tmp_path: Path) -> None:
    new, old = (siglip_projector(tmp_path / f"{swaps}.gguf", "gemma3", swaps=swaps) for swaps in (False, True))
    assert np.array_equal(rows_of(old, picture(64, 64))[0], rows_of(new, picture(64, 64))[0])


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_makes_the_same_bits(kind: str, type_name: str, tmp_path: Path) -> None:
    side: dict[str, int] = {"image_size": 128, "patch_size": 16, "merge": 2} if kind == "lfm2" else {}
    path = siglip_projector(tmp_path / "m.gguf", kind, type_name, **side)
    one, given = rows_of(path, picture(150, 90), 1), picture(150, 90)
    for n_threads in (2, 3):
        assert all(np.array_equal(a, b) for a, b in zip(one, rows_of(path, given, n_threads), strict=True))


def test_other_instructions_make_nearly_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = siglip_projector(tmp_path / "m.gguf", "idefics3", "Q8_0", n_layer=1)
    best = rows_of(path, picture(64, 64))
    names = {opened(path).identity}
    monkeypatch.setenv("EDGEDEC_CPU_ISA", "portable")
    portable = rows_of(path, picture(64, 64))
    assert len(names | {opened(path).identity}) == 2
    assert all(np.abs(a - b).max() < 1e-3 for a, b in zip(best, portable, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_nearer_to_float64_than_those_of_libmtmd(kind: str, type_name: str, tmp_path: Path) -> None:
    from edgedec_runtimes.pictures.header import opening
    from edgedec_runtimes.pictures.mtmd import Mtmd

    merge, side = (2, 128) if kind == "lfm2" else (4, 64)
    path = siglip_projector(
        tmp_path / "m.gguf", kind, type_name, image_size=side, patch_size=side // 8, merge=merge, n_layer=3
    )
    given = picture(side, side)
    theirs = Mtmd(opening(read_projector(path), "llama", 2, None))
    layout, made = theirs.encode(given, lambda done, total: None)
    theirs.close()
    encoder = opened(path)
    assert encoder.layout(side, side) == layout
    file = siglip_file(read_gguf(path), kind, 64, None)
    assert file is not None
    for ours, other, tile in zip(encoder.encode(given), made, tiles_of(file.cutting, given), strict=True):
        truth = true_rows(path, kind, np.asarray(tile), merge=merge, n_head=2)
        ours_off, theirs_off = (float(np.sqrt(np.mean((rows - truth) ** 2))) for rows in (ours, other))
        assert ours_off < theirs_off
        assert np.abs(ours - other).max() < 8 * theirs_off


def test_progress_counts_tiles_and_a_cancelled_picture_leaves_the_encoder_usable(tmp_path: Path) -> None:
    encoder = opened(tiny_projector(tmp_path / "m.gguf", "idefics3"))
    cancel, seen = CancelToken(), list[Progress]()

    def stop_at_third(progress: Progress) -> None:
        seen.append(progress)
        if progress.done == 2:
            cancel.cancel()

    with pytest.raises(CancelledError, match="encoding a picture"):
        encoder.encode(picture(64, 64), cancel, stop_at_third)
    assert [(p.done, p.total, p.unit) for p in seen] == [(0, 5, "tiles"), (1, 5, "tiles"), (2, 5, "tiles")]
    assert len(encoder.encode(picture(64, 64))) == 5


def test_a_closed_encoder_maps_its_file_again(tmp_path: Path) -> None:
    encoder = opened(tiny_projector(tmp_path / "m.gguf", "gemma3"))
    first = encoder.encode(picture(64, 64))
    encoder.close()
    encoder.close()
    assert np.array_equal(first[0], encoder.encode(picture(64, 64))[0])


def test_the_plan_has_the_file_and_the_buffers_of_a_tile(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "m.gguf", "gemma3")
    weights, buffers = opened(path).terms()
    assert weights.n_bytes == path.stat().st_size
    assert weights.grows
    assert buffers.grows
    assert 64 * (2 * 32 + 3 * 32) * 4 < buffers.n_bytes < 2_000_000


@pytest.mark.parametrize(
    "kind_and_more",
    [
        ("internvl", {}),
        ("gemma3", {"clip.vision.attention.head_count_kv": 1}),
        ("gemma3", {"clip.vision.feature_layer": 1}),
        ("idefics3", {"clip.vision.attention.head_count": 3}),
        ("idefics3", {"clip.vision.projector.scale_factor": 3}),
        ("lfm2", {"clip.vision.block_count": 3}),
        ("lfm2", {"clip.use_silu": True}),
    ],
)
def test_what_the_encoder_does_not_know_is_left_to_libmtmd(
    kind_and_more: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    kind, more = kind_and_more
    path = tiny_projector(tmp_path / "m.gguf", kind, more=more)
    assert open_native(path, read_projector(path)) is None


@pytest.mark.parametrize(
    "name", ["v.blk.1.ln2.weight", "v.post_ln.weight", "v.position_embd.weight", "v.blk.0.attn_k.weight"]
)
def test_a_file_that_lacks_a_tensor_is_left_to_libmtmd(name: str, tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "m.gguf", "idefics3", without=(name,))
    assert open_native(path, read_projector(path)) is None


def damaged(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_weights_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "m.gguf", "gemma3")
    tensor = read_gguf(path).tensors["v.blk.0.ffn_up.weight"]

    def fill(data: bytearray) -> None:
        data[tensor.offset : tensor.offset + tensor.n_bytes] = b"\xff" * tensor.n_bytes

    damaged(path, fill)
    with pytest.raises(ModelFormatError, match="infinite or NaN; the file is damaged"):
        opened(path).encode(picture(64, 64))


def test_another_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "m.gguf", "gemma3")
    encoder = opened(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ModelFormatError, match="another file stands there"):
        encoder.encode(picture(64, 64))


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file can't be cut short there")
def test_a_file_that_is_cut_short_between_two_pictures_is_an_error(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "m.gguf", "gemma3")
    encoder = opened(path)
    encoder.encode(picture(64, 64))
    os.truncate(path, 4096)
    with pytest.raises(StorageError, match=r"m\.gguf: .*; the picture encoder is mapped from there"):
        encoder.encode(picture(64, 64))
