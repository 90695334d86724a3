"""How large a picture may be, and the size that it is worked on with; nothing here looks at a pixel."""

from dataclasses import dataclass

from edgedec.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are read, by Pillow's names. Most faults of decoders were in other formats."""
MOST_PIXELS = 40_000_000
LEAST_MOST_PIXELS = 4_200_000
"""The pixels that a picture may have however little memory is allowed: more than an encoder looks at."""

_HALVED_FROM = 4 * LEAST_MOST_PIXELS
_PIXEL_BYTES = 14  # of a picture that is worked on as it is: in Pillow, as bytes, joined, and in the encoder
_LARGE_PIXEL_BYTES = 10  # of one that is halved: in Pillow, on white, and what is transparent
_CAP_PART = 5  # the part of a memory cap that pixels may take


@dataclass(frozen=True, slots=True)
class Limits:
    """What a picture is refused for, before a pixel of it is decoded.

    Attributes:
        n_bytes: Most bytes of its file.
        pixels: Most pixels, after halved() where the file is a JPEG, which is decoded at half its size.
        side: Most pixels of a side.
        aspect: How many times as long one side may be as the other.
    """

    n_bytes: int = 32 << 20
    pixels: int = MOST_PIXELS
    side: int = 32_768
    aspect: int = 200

    def require_bytes(self, n_bytes: int, name: str) -> None:
        """Raise RequestError for a file of so many bytes that it is not read."""
        if not 0 < n_bytes <= self.n_bytes:
            raise RequestError(
                f"{name}: the picture's file has {n_bytes:,} bytes; give one that has some, and at most "
                f"{self.n_bytes:,} ({self.n_bytes >> 20} MiB)"
            )

    def require_size(self, width: int, height: int, name: str, *, is_jpeg: bool = False) -> None:
        """Raise RequestError for a picture of that size that is not decoded."""
        size = f"{name}: the picture is {width} x {height} pixels"
        if width < 1 or height < 1 or max(width, height) > self.side:
            raise RequestError(f"{size}; a side may have 1 to {self.side:,}: make it smaller")
        if max(width, height) > self.aspect * min(width, height):
            raise RequestError(f"{size}; one side may be {self.aspect} times as long as the other: cut it into parts")
        decoded = halved(width, height) if is_jpeg else (width, height)
        if decoded[0] * decoded[1] > self.pixels:
            raise RequestError(
                f"{size}, {width * height / 1e6:.1f} million; at most {self.pixels / 1e6:.1f} million are decoded: "
                "make it smaller" + ("" if is_jpeg else ", or send it as a JPEG") + ", or allow more memory"
            )

    @property
    def memory_bytes(self) -> int:
        """The bytes that the largest picture takes while it is decoded and handed on."""
        return max(_PIXEL_BYTES * min(self.pixels, _HALVED_FROM), _LARGE_PIXEL_BYTES * self.pixels)


def limits_within(cap_bytes: int | None) -> Limits:
    """Return the limits under a memory cap, or without one: under a cap pixels take a fifth of it at most."""
    if cap_bytes is None:
        return Limits()
    most = cap_bytes // _CAP_PART // _PIXEL_BYTES
    return Limits(pixels=min(MOST_PIXELS, max(LEAST_MOST_PIXELS, most)))


def halved(width: int, height: int) -> tuple[int, int]:
    """Return the size that a picture is worked on with: half of it where that is still more than encoders look at.

    >>> halved(4000, 3000), halved(6001, 4000)
    ((4000, 3000), (3001, 2000))
    """
    if width * height < _HALVED_FROM:
        return width, height
    return -(-width // 2), -(-height // 2)
