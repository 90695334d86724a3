"""How pictures are cut into tiles for gemma3, idefics3 and lfm2: sizes, marks and pixels, as libmtmd makes them.

Sizes are computed in float32 where llama.cpp does so: in double precision some would be rounded to another multiple.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgedec.errors import RequestError
from edgedec.pictures import Block
from edgedec_runtimes.pictures.contract import Picture, PictureLayout

if TYPE_CHECKING:
    from PIL import Image

KINDS = ("gemma3", "idefics3", "lfm2")

Size = tuple[int, int]
"""Width and height."""

_PILLOW_BYTES = 4  # of a pixel
_LFM2_TILE, _LFM2_MOST_TILES, _LFM2_TOLERANCE = 512, 10, 2.0
_LFM2_ROWS = (64, 256)  # least and most of a picture that is not cut
_MOST_PATCHES = 1 << 16  # of one tile
_MOST_TILES = 1024
_MOST_SIDE, _MOST_PIXELS = 1 << 16, 1 << 26  # of what tiles are cut from


@dataclass(frozen=True, slots=True)
class Cutting:
    """What decides how a family's pictures are cut.

    Attributes:
        kind: One of KINDS.
        image_size, patch_size: In pixels.
        merge: merge x merge patches become one row.
        longest_edge: What idefics3 enlarges the longer side to; 0 for none.
        max_tokens: Most rows of a picture that the user wants, where the kind has such a limit; 0 for none.
    """

    kind: str
    image_size: int
    patch_size: int
    merge: int
    longest_edge: int = 0
    max_tokens: int = 0

    @property
    def factor(self) -> int:
        """The pixels of a side that become one row."""
        return self.patch_size * self.merge


@dataclass(frozen=True, slots=True)
class Cut:
    """How one picture is cut.

    Attributes:
        first: The size that the picture is resized to before it is resized to `refined`; None where it is not.
        refined: The size that tiles are cut from, or None where there are none.
        tile: The side of a tile.
        whole: The size at which the whole picture is encoded, behind the tiles.
        is_padded: Whether `refined` keeps the ratio, with black beside the picture; where there are no tiles, `whole`.
        resampling: "bilinear", "bicubic" or "lanczos".
    """

    first: Size | None
    refined: Size | None
    tile: int
    whole: Size
    is_padded: bool
    resampling: str

    @property
    def grid(self) -> Size:
        """Columns and rows of tiles."""
        return (self.refined[0] // self.tile, self.refined[1] // self.tile) if self.refined else (0, 0)


def cut_of(cutting: Cutting, width: int, height: int) -> Cut:
    """Return how a picture of that size is cut.

    Raises:
        RequestError: It is too narrow, or becomes too many patches.
    """
    size = cutting.image_size
    if cutting.kind == "gemma3":
        cut = Cut(None, None, size, (size, size), True, "bilinear")
    elif cutting.kind == "lfm2":
        cut = _cut_lfm2(cutting, width, height)
    else:
        cut = _cut_idefics3(cutting, width, height)
    sizes = [size for size in (cut.first, cut.refined, cut.whole) if size]
    sides = [side for size in sizes for side in size]
    n_patches = max(cut.whole[0] * cut.whole[1], cut.tile**2 if cut.refined else 0) // cutting.patch_size**2
    n_columns, n_lines = cut.grid
    if (
        not 1 <= min(sides) <= max(sides) <= _MOST_SIDE
        or max(size[0] * size[1] for size in sizes) > _MOST_PIXELS
        or n_columns * n_lines > _MOST_TILES
        or n_patches > _MOST_PATCHES
    ):
        raise RequestError(
            f"a picture of {width} x {height} pixels can't be cut into tiles; give one that is less narrow, or smaller"
        )
    return cut


def layout_of(cutting: Cutting, width: int, height: int) -> PictureLayout:
    """Return what a picture of that size becomes in a prompt (raises as cut_of)."""
    cut = cut_of(cutting, width, height)
    n_columns, n_lines = cut.grid
    parts, blocks = list[str | int](), list[Block]()

    def add(mark: str, size: Size | None = None) -> None:
        if parts and isinstance(parts[-1], str) and mark:
            parts[-1] += mark
        elif mark:
            parts.append(mark)
        if size is not None:
            n = (size[0] // cutting.factor) * (size[1] // cutting.factor)
            parts.append(len(blocks))
            blocks.append(Block(n, n, 1, cutting.kind == "gemma3"))

    tile = (cut.tile, cut.tile)
    if cutting.kind == "gemma3":
        add("<start_of_image>", cut.whole)
        add("<end_of_image>")
    elif cutting.kind == "lfm2":
        add("<|image_start|>")
        for line in range(n_lines):
            for column in range(n_columns):
                add(f"<|img_row_{line + 1}_col_{column + 1}|>", tile)
        add("<|img_thumbnail|>" if cut.refined else "", cut.whole)
        add("<|image_end|>")
    else:
        for line in range(n_lines):
            for column in range(n_columns):
                add(f"<fake_token_around_image><row_{line + 1}_col_{column + 1}>", tile)
            add("\n" if line < n_lines - 1 else "")
        add("\n\n<fake_token_around_image><global-img>", cut.whole)
        add("<fake_token_around_image>")
    return PictureLayout(tuple(parts), tuple(blocks))


def largest_tile(cutting: Cutting) -> int:
    """Return the side of the tiles that pictures are cut into, in pixels."""
    return _LFM2_TILE if cutting.kind == "lfm2" else cutting.image_size


def resized_bytes(cutting: Cutting) -> int:
    """Return the bytes of the largest picture that tiles are cut from, beside the one that it is made of."""
    tile = largest_tile(cutting)
    if cutting.kind == "lfm2":
        n_tiles = _LFM2_MOST_TILES
    elif cutting.max_tokens or not cutting.longest_edge:
        n_tiles = -(-cutting.max_tokens * cutting.factor**2 // tile**2) or 1
    else:
        n_tiles = math.ceil(cutting.longest_edge / tile) ** 2
    return 2 * _PILLOW_BYTES * n_tiles * tile**2


def tiles_of(cutting: Cutting, picture: Picture) -> Iterator["Image.Image"]:
    """Yield the pictures that are encoded, in the order of the blocks of layout_of() (raises as cut_of)."""
    from PIL import Image

    cut = cut_of(cutting, picture.width, picture.height)
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    filters = {
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
        "lanczos": Image.Resampling.LANCZOS,
    }
    how = filters[cut.resampling]
    refined = None
    if cut.refined is not None:
        resized = image if cut.first is None else _resized(image, cut.first, how)
        refined = _padded(resized, cut.refined, how) if cut.is_padded else _resized(resized, cut.refined, how)
        del resized
        n_columns, n_lines = cut.grid
        for i in range(n_columns * n_lines):
            left, top = i % n_columns * cut.tile, i // n_columns * cut.tile
            yield refined.crop((left, top, left + cut.tile, top + cut.tile))
    whole = refined if refined is not None and cut.first is not None else image
    is_padded = cut.is_padded and refined is None
    yield _padded(whole, cut.whole, how) if is_padded else _resized(whole, cut.whole, how)


def _resized(image: "Image.Image", size: Size, how: "Image.Resampling") -> "Image.Image":
    """Return a picture at another size, its rows resampled before its columns: Pillow chooses an order of its own."""
    return image.resize((size[0], image.height), how).resize(size, how)


def _padded(image: "Image.Image", size: Size, how: "Image.Resampling") -> "Image.Image":
    """Return a picture in the middle of a black one of that size, as large as its ratio allows."""
    from PIL import Image

    if image.size == size:
        return image
    scale = min(np.float32(size[0]) / np.float32(image.width), np.float32(size[1]) / np.float32(image.height))
    width, height = (min(math.ceil(np.float32(n) * scale), most) for n, most in zip(image.size, size, strict=True))
    black = Image.new("RGB", size)
    black.paste(_resized(image, (width, height), how), ((size[0] - width) // 2, (size[1] - height) // 2))
    return black


def _cut_idefics3(cutting: Cutting, width: int, height: int) -> Cut:
    size, edge = cutting.image_size, cutting.longest_edge
    whole = (size, size)
    if edge == 0 or cutting.max_tokens:
        refined = _aligned(width, height, size, 0, cutting.max_tokens * cutting.factor**2, edge)
        return Cut(None, refined, size, whole, True, "bicubic")
    ratio = width / height
    if width >= height:
        first = (edge, int(edge / ratio))
        first = (edge, first[1] + first[1] % 2)
    else:
        first = (int(edge * ratio), edge)
        first = (first[0] + first[0] % 2, edge)
    refined = (math.ceil(first[0] / size) * size, math.ceil(first[1] / size) * size)
    return Cut(first, refined, size, whole, False, "lanczos")


def _cut_lfm2(cutting: Cutting, width: int, height: int) -> Cut:
    area, factor = cutting.factor**2, cutting.factor
    least, most = _LFM2_ROWS[0] * area, (cutting.max_tokens or _LFM2_ROWS[1]) * area
    whole = _aligned(width, height, factor, least, most)
    sides = [max(cutting.patch_size, round(side / factor) * factor) for side in (width, height)]
    if sides[0] * sides[1] <= most * _LFM2_TOLERANCE:
        return Cut(None, None, _LFM2_TILE, whole, False, "bilinear")
    n_columns, n_lines = _lfm2_grid(width, height)
    return Cut(None, (n_columns * _LFM2_TILE, n_lines * _LFM2_TILE), _LFM2_TILE, whole, True, "bilinear")


def _lfm2_grid(width: int, height: int) -> Size:
    """Return the columns and rows of 2 to 10 tiles whose ratio is nearest to the picture's."""
    most = _LFM2_MOST_TILES
    grids = [(x, y) for n in range(2, most + 1) for x in range(1, n + 1) for y in range(1, n + 1) if 2 <= x * y <= most]
    ratio, area = np.float32(width) / np.float32(height), np.float32(width * height)
    best, least = (1, 1), np.float32(np.inf)
    for grid in sorted(dict.fromkeys(grids), key=lambda grid: grid[0] * grid[1]):
        difference = abs(ratio - np.float32(grid[0]) / np.float32(grid[1]))
        if difference < least:
            best, least = grid, difference
        elif difference == least and area > 0.5 * _LFM2_TILE**2 * grid[0] * grid[1]:
            best = grid
    return best


def _aligned(width: int, height: int, factor: int, least: int, most: int, edge: int = 0) -> Size:
    """Return a size with sides that are multiples of a factor, and as many pixels as is allowed.

    Args:
        width, height: The picture's size.
        factor: What divides both sides.
        least, most: The limits of the pixels; 0 for none.
        edge: What the longer side becomes first; 0: it stays.
    """
    f, sides = np.float32(factor), (np.float32(width), np.float32(height))
    area = sides[1] * sides[0]
    if edge:
        scale = min(np.float32(edge) / side for side in sides)
        counts = [math.ceil(side * scale / f) for side in sides]
    else:
        counts = [max(1, math.floor(side / f + np.float32(0.5))) for side in sides]
    n_pixels = counts[0] * counts[1] * factor**2
    if 0 < most < n_pixels:
        ratio = np.sqrt(area / np.float32(most))
        counts = [max(1, math.floor(side / ratio / f)) for side in sides]
    elif n_pixels < least:
        ratio = np.sqrt(np.float32(least) / area)
        counts = [math.ceil(side * ratio / f) for side in sides]
    return counts[0] * factor, counts[1] * factor
