"""Pictures are decoded upright, on white and in 8 bits; what is hostile is refused before it costs memory or time."""

import io
import random
import struct
import zlib
from typing import Any

import pytest

from edgedec.errors import EdgedecError, RequestError
from edgedec_runtimes.pictures import decoding
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.decoding import decode, measure, of_image
from edgedec_runtimes.pictures.limits import MOST_PIXELS, Limits, halved, limits_within

Image = pytest.importorskip("PIL.Image")
LIMITS = Limits()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def saved(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that claims a size, with whatever pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def corners() -> Any:
    """A picture of 2 x 3 pixels whose first row is red and green."""
    image = Image.new("RGB", (2, 3), BLUE)
    image.putpixel((0, 0), RED)
    image.putpixel((1, 0), GREEN)
    return image


def pixel(picture: Picture, x: int, y: int) -> tuple[int, ...]:
    return tuple(picture.rgb[3 * (y * picture.width + x) :][:3])


def decoded(data: bytes) -> Picture:
    """A picture, after measure() said the size that it has."""
    picture = decode(data, LIMITS, "a.png")
    assert measure(data, LIMITS, "a.png") == (picture.width, picture.height)
    assert len(picture.rgb) == 3 * picture.width * picture.height
    return picture


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP"])
def test_pixels_of_every_format_are_those_that_were_saved(kind: str) -> None:
    picture = decoded(saved(corners(), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert (picture.width, picture.height) == (2, 3)
    assert [pixel(picture, 0, 0), pixel(picture, 1, 0), pixel(picture, 1, 2)] == [RED, GREEN, BLUE]


@pytest.mark.parametrize(
    ("orientation", "size", "first"),
    [(1, (2, 3), RED), (3, (2, 3), BLUE), (6, (3, 2), BLUE), (8, (3, 2), GREEN), (9, (2, 3), RED)],
)
def test_a_picture_is_turned_as_its_exif_data_say(
    orientation: int, size: tuple[int, int], first: tuple[int, ...]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = decoded(saved(corners(), exif=exif))
    assert (picture.width, picture.height) == size
    assert pixel(picture, 0, 0) == first


def test_what_is_transparent_lies_on_white() -> None:
    layers = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    layers.putpixel((1, 0), (255, 0, 0, 128))
    picture = decoded(saved(layers))
    assert [pixel(picture, 0, 0), pixel(picture, 1, 0)] == [WHITE, (255, 127, 127)]
    palette = Image.new("P", (1, 1), 0)
    assert pixel(decoded(saved(palette, "GIF", transparency=0)), 0, 0) == WHITE


def test_other_depths_and_colours_become_8_bits_of_rgb() -> None:
    grey = Image.new("I;16", (1, 1), 32896)  # 257 * 128
    assert pixel(decoded(saved(grey)), 0, 0) == (128, 128, 128)
    assert pixel(decoded(saved(Image.new("1", (1, 1), 1))), 0, 0) == WHITE
    assert pixel(decoded(saved(Image.new("LA", (1, 1), (0, 0)))), 0, 0) == WHITE
    picture = decoded(saved(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"))
    assert pixel(picture, 0, 0) == WHITE


@pytest.mark.parametrize(
    ("mode", "value", "grey"),
    [
        ("I;16", 128, 0),  # dark, and no value of the picture is over 255
        ("I;16", 257, 1),
        ("I;16", 32896, 128),
        ("I;16", 65535, 255),
        ("I;16B", 257 * 100, 100),
        ("I", 40, 40),
        ("I", 70_000, 255),
        ("I", -3, 0),
        ("F", 40.0, 40),
        ("F", 1e9, 255),
        ("1", 1, 255),
        ("L", 40, 40),
        ("LA", (40, 255), 40),
        ("P", 0, 0),
        ("CMYK", (0, 0, 0, 55), 200),
    ],
)
def test_a_grey_is_that_of_its_formula_whatever_else_the_picture_holds(mode: str, value: Any, grey: int) -> None:
    image = Image.new(mode, (2, 1), value)
    assert pixel(of_image(image, LIMITS, "a picture"), 0, 0) == (grey,) * 3
    if mode in ("I;16", "1", "L", "LA", "P"):
        assert pixel(decoded(saved(image)), 0, 0) == (grey,) * 3


def exif_of(*entries: tuple[int, int, int, int], order: str = "<") -> bytes:
    """EXIF data of (tag, type, number of values, value)."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    body = b"".join(struct.pack(f"{order}HHIHH", *entry, 0) for entry in entries)
    return b"Exif\0\0" + head + struct.pack(f"{order}IH", 8, len(entries)) + body + bytes(4)


TURNED = (0x0112, 3, 1, 6)


@pytest.mark.parametrize(
    ("exif", "is_turned"),
    [
        (exif_of(TURNED), True),
        (exif_of((0x010F, 2, 10**9, 9), TURNED, order=">"), True),  # another entry is beyond the end
        (exif_of(TURNED)[:20], False),
        (exif_of((0x0112, 2, 1, 6)), False),
        (exif_of((0x0112, 3, 1, 9), (0x0112, 3, 1, 0)), False),
        (exif_of(TURNED).replace(b"*", b"+"), False),
        (exif_of(TURNED).replace(b"\x08\0\0\0", b"\xff\xff\xff\xff"), False),
        (b"Exif\0\0", False),
        (b"Exif\0\0" + b"\xff" * 100, False),
        # An entry of nearly all bytes, as often as it fits: each would be copied by a reader of all entries.
        (exif_of(*((0x8000 + i, 7, 60_000, 8) for i in range(5000))), False),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_data_turn_nothing_and_the_picture_is_shown(kind: str, exif: bytes, is_turned: bool) -> None:
    data = saved(Image.new("RGB", (16, 8), RED), kind)
    if kind == "JPEG":
        data = data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]
    elif kind == "PNG":
        data = data[:33] + chunk(b"eXIf", exif[6:]) + data[33:]
    else:
        data = saved(Image.new("RGB", (16, 8), RED), kind, exif=exif)
    picture = decoded(data)
    assert (picture.width, picture.height) == ((8, 16) if is_turned else (16, 8))


def test_an_image_of_an_application_with_damaged_exif_data_is_shown() -> None:
    image = Image.new("RGB", (16, 8), RED)
    image.info["exif"] = b"Exif\0\0II*\0\xff"
    assert of_image(image, LIMITS, "a picture").width == 16
    with pytest.raises(RequestError, match=r"mode La.*RGB"):
        of_image(Image.new("La", (2, 2)), LIMITS, "a picture")


def test_a_jpeg_without_what_describes_it_has_the_same_pixels() -> None:
    """EXIF data, a profile, a comment and a preview are dropped; Adobe's segment, which names the colours, stays."""
    noise = Image.frombytes("RGB", (40, 30), random.Random(1).randbytes(3600))
    more = {"icc_profile": bytes(100_000), "comment": b"\xff\xda" * 200, "exif": exif_of(TURNED)}
    for image in (noise, noise.convert("CMYK"), noise.convert("L")):
        for kind in ({}, {"progressive": True}):
            plain = Image.open(io.BytesIO(saved(image, "JPEG", **kind))).convert("RGB").transpose(4)
            assert decoded(saved(image, "JPEG", **kind, **more)).rgb == plain.tobytes()


def scans(n: int, side: int = 16) -> bytes:
    """A progressive JPEG whose last scan comes n times more."""
    data = saved(Image.new("L", (side, side)), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xc4") : -2] * n + data[-2:]


def test_a_jpeg_of_a_hundred_scans_is_refused() -> None:
    assert decoded(scans(80)).width == 16
    data = scans(100)
    for read in (measure, decode):
        with pytest.raises(RequestError, match="over 100 scans"):
            read(data, LIMITS, "a.jpg")


@pytest.mark.parametrize(
    ("data", "is_measured"),
    [
        (scans(90, 2000), True),
        (png_of(8, 8)[:33] + chunk(b"abCd", b"") * 10_000 + png_of(8, 8)[33:], False),
        (saved(Image.new("RGB", (8, 8)), "PNG")[:-12] + chunk(b"abCd", b"") * 10_000, True),
        (b"GIF89a\x08\0\x08\0\0\0\0" + b"!\xfe\x01a\0" * 10_000, False),
    ],
    ids=["scans of a JPEG", "chunks of a PNG", "chunks behind the pixels", "comments of a GIF"],
)
def test_a_picture_takes_no_more_of_the_cpu_than_its_limit(
    data: bytes, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is that of the thread's work, looked at while the decoder is at work."""
    clock = iter(range(10**9))
    monkeypatch.setattr(decoding, "thread_time", lambda: next(clock) / 10)
    if is_measured:
        monkeypatch.setattr(decoding, "_HEADER_S", 1e9)
        measure(data, LIMITS, "a picture")
    with pytest.raises(RequestError, match=r"can't be read within \d s"):
        (decode if is_measured else measure)(data, LIMITS, "a picture")


def test_the_first_frame_of_an_animation_is_the_picture() -> None:
    first, second = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), GREEN)
    data = saved(first, "GIF", save_all=True, append_images=[second] * 20)
    assert pixel(decoded(data), 0, 0) == RED


@pytest.mark.slow
def test_a_picture_far_larger_than_an_encoder_looks_at_is_halved() -> None:
    assert halved(4096, 4096) == (4096, 4096)
    assert halved(4101, 4099) == (2051, 2050)
    wide = Image.new("L", (8200, 2050), 200)
    assert pixel(decoded(saved(wide)), 0, 0) == (200, 200, 200)
    assert decoded(saved(wide, "JPEG")).width == 4100


@pytest.mark.parametrize(
    ("size", "says"),
    [((1, 100_000), "a side may have"), ((10, 2001), "200 times as long"), ((20_000, 20_000), "million are decoded")],
)
def test_a_size_beyond_the_limits_is_refused_by_the_header(size: tuple[int, int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        measure(png_of(*size), LIMITS, "a.png")


def test_a_memory_cap_limits_the_pixels_and_not_the_text() -> None:
    assert limits_within(None).pixels == limits_within(8 << 30).pixels == MOST_PIXELS
    small = limits_within(420_000_000)
    assert small.pixels == 6_000_000
    assert small.memory_bytes == 84_000_000
    with pytest.raises(RequestError, match=r"12\.0 million; at most 6\.0 million"):
        small.require_size(4000, 3000, "a.png")
    assert halved(4000, 3000) == (4000, 3000)  # never by the cap


def test_pixels_that_an_application_gives_are_turned_and_composed_too() -> None:
    picture = of_image(Image.new("RGBA", (3, 2), (0, 0, 0, 0)), LIMITS, "a picture")
    assert (picture.width, picture.height, pixel(picture, 0, 0)) == (3, 2, WHITE)


def hostile(draw: random.Random) -> bytes:
    """A picture that was cut, changed, repeated or made up."""
    kind = draw.choice(["PNG", "JPEG", "GIF", "BMP", "WEBP"])
    mode = draw.choice(["RGB", "L"]) if kind in ("JPEG", "WEBP") else draw.choice(["RGB", "L", "P"])
    noise = Image.frombytes("RGB", (40, 30), draw.randbytes(3600)).convert(mode)
    data = bytearray(saved(noise.convert("RGB") if kind == "WEBP" else noise, kind))
    way = draw.randrange(5)
    if way == 0:
        return bytes(data[: draw.randrange(len(data))])
    if way == 1:
        for _ in range(draw.randrange(1, 40)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data)
    if way == 2:
        start = draw.randrange(min(64, len(data)))
        return bytes(data[:start] + draw.randbytes(8) + data[start + 8 :])
    if way == 3:
        return png_of(
            draw.choice([1, 3000, 6000]), draw.choice([1, 3000, 6000]), zlib.compress(bytes(draw.randrange(10**6)))
        )
    return draw.choice(
        [b"", b"GIF89a", b"\xff\xd8\xff", b"BM", b"RIFF\0\0\0\0WEBP", b"%PDF-1.4", b"<svg/>"]
    ) + draw.randbytes(30)


@pytest.mark.slow
def test_a_hundred_hostile_pictures_are_each_a_picture_or_an_error() -> None:
    draw, n_pictures = random.Random(38), 0
    for _ in range(100):
        data = hostile(draw)
        try:
            picture = decode(data, LIMITS, "a picture")
        except EdgedecError:
            continue
        n_pictures += 1
        assert len(picture.rgb) == 3 * picture.width * picture.height <= 3 * 40_000_000
    assert 5 < n_pictures < 80
