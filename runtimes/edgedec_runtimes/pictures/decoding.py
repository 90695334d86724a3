"""Decoding of pictures with Pillow, in the child process: a decoder that fails, hangs or ends takes nobody with it."""

import io
import re
import struct
from contextlib import suppress
from importlib.metadata import version
from time import thread_time
from typing import TYPE_CHECKING, Any

from edgedec.errors import EdgedecError, RequestError, RuntimeUnavailableError
from edgedec.plugins import install_command
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.limits import FORMATS, Limits, halved

if TYPE_CHECKING:
    from PIL import Image, ImageFile

_ORIENTATION, _SHORT = 0x0112, 3  # EXIF's number of the tag, and of its type
_RULES = 2  # of the pixels that a file becomes: one more where any of them changes, as rows are kept by their ids
_TURNED = 5  # orientations from here on swap width and height
_HEADER_S, _MOST_S = 1.0, 5.0  # of CPU for a header, and for a picture; looked at wherever the decoder reads on
_MOST_SCANS = 100  # of a JPEG: each goes through all pixels, however few bytes it has
_MOST_SEGMENTS = 10_000
_JPEG_BLOCK = 512  # bytes that are decoded between two looks at the clock, so at most a few scans
_SEGMENT = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")  # its first bytes; marks within a scan are left out
_EXIF = b"Exif\0\0"


class _ClockedFile(io.BytesIO):
    """A picture's file that ends the work of its thread after some seconds of CPU (RequestError)."""

    def __init__(self, data: bytes, name: str, most_s: float) -> None:
        super().__init__(data)
        self._name, self._most_s, self._end_s = name, most_s, thread_time() + most_s

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as any file does, while there is time."""
        if thread_time() > self._end_s:
            raise RequestError(
                f"{self._name}: the picture can't be read within {self._most_s:.0f} s; save it anew as a plain PNG "
                "or JPEG, or make it smaller"
            )
        return super().read(size)


def decoder_version() -> str:
    """Return the version of the decoder and of our rules (RuntimeUnavailableError where Pillow is not installed)."""
    _pillow()
    return f"Pillow {version('pillow')} {_RULES}"


def measure(data: bytes, limits: Limits, name: str) -> tuple[int, int]:
    """Return width and height of the picture that decode() returns, from the file's header alone.

    Raises:
        RequestError: The file is no picture, is damaged, or is beyond the limits.
        RuntimeUnavailableError: Pillow is not installed.
    """
    image, orientation = _opened(data, limits, name, _HEADER_S)
    width, height = halved(*image.size)
    return (height, width) if orientation >= _TURNED else (width, height)


def decode(data: bytes, limits: Limits, name: str) -> Picture:
    """Return the pixels of a picture's file: its first frame, turned as its EXIF data say, on white, in 8 bits.

    Raises what measure() raises.
    """
    image, orientation = _opened(data, limits, name, _MOST_S)
    size = halved(*image.size)
    try:
        if image.format == "JPEG":
            image.decodermaxblock = _JPEG_BLOCK
            if size != image.size:
                image.draft("RGB", size)
        image.load()
        pixels = _eight_bits(image)
        if image.size != size:
            pixels = pixels.reduce(2)
        turned = upright(pixels, orientation)
        return Picture(*turned.size, turned.tobytes())
    except EdgedecError:
        raise
    except Exception as error:
        raise _damaged(error, name) from error


def of_image(image: Any, limits: Limits, name: str) -> Picture:
    """Return the pixels of a PIL.Image that the application made (RequestError beyond the limits)."""
    width, height = image.size
    limits.require_size(width, height, name)
    orientation = 1
    with suppress(Exception):  # damaged EXIF data fail in many ways, and turn nothing
        orientation = image.getexif().get(_ORIENTATION, 1)
    try:
        turned = upright(_eight_bits(image), orientation)
    except ValueError as error:
        raise RequestError(f"{name}: a picture of mode {image.mode} can't be converted; give one in RGB") from error
    return Picture(*turned.size, turned.tobytes())


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise RuntimeUnavailableError(f"pictures are decoded by Pillow: {install_command('images')}") from error
    return Image


def _opened(data: bytes, limits: Limits, name: str, most_s: float) -> tuple["ImageFile.ImageFile", int]:
    """Return a picture whose header was read and is within the limits, and its EXIF orientation."""
    limits.require_bytes(len(data), name)
    pillow = _pillow()
    pillow.MAX_IMAGE_PIXELS = None  # the limits are checked below, before a pixel is decoded
    exif = b""
    if data.startswith(b"\xff\xd8\xff"):
        data, exif = _plain_jpeg(data, name)
    try:
        image = pillow.open(_ClockedFile(data, name, most_s), formats=FORMATS)
        width, height = image.size
        limits.require_size(width, height, name, is_jpeg=image.format == "JPEG")
        return image, _orientation_of(exif or image.info.get("exif"))
    except EdgedecError:
        raise
    except Exception as error:
        raise _damaged(error, name) from error


def _plain_jpeg(data: bytes, name: str) -> tuple[bytes, bytes]:
    """Return a JPEG without profiles, previews and comments, and its EXIF data (RequestError for too many scans)."""
    parts, exif, start, n_scans, n_segments = [data[:2]], b"", 2, 0, 0
    while (head := _SEGMENT.search(data, start)) is not None and (kind := head[0][1]) != 0xD9:  # the end
        end = head.end() + max(2, int.from_bytes(data[head.end() : head.end() + 2], "big"))
        body, start = data[head.end() + 2 : end], end
        n_segments += 1
        n_scans += kind == 0xDA
        if n_scans > _MOST_SCANS or n_segments > _MOST_SEGMENTS:
            raise RequestError(
                f"{name}: the JPEG has over {_MOST_SCANS} scans, or over {_MOST_SEGMENTS} segments; save it anew"
            )
        if n_scans == 1 and kind == 0xDA:
            parts.append(data[head.start() :])
        elif not n_scans and (kind in (0xE0, 0xEE) or not 0xE0 <= kind <= 0xEF) and kind != 0xFE:
            parts.append(data[head.start() : end])  # of what is for programs: JFIF's, and Adobe's, which names colours
        elif kind == 0xE1 and body.startswith(_EXIF):
            exif = exif or body
    return b"".join(parts), exif


def _orientation_of(exif: object) -> int:
    """Return the orientation, 1 to 8, that EXIF data say; 1 where they are absent, damaged, or say something else."""
    with suppress(struct.error, KeyError):
        if isinstance(exif, bytes):
            exif = exif.removeprefix(_EXIF)
            order = {b"II*\0": "<", b"MM\0*": ">"}[exif[:4]]
            (start,) = struct.unpack_from(f"{order}I", exif, 4)
            for i in range(*struct.unpack_from(f"{order}H", exif, start)):
                tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, start + 2 + 12 * i)
                if tag == _ORIENTATION and kind == _SHORT and 1 <= value <= 8:
                    return int(value)
    return 1


def _damaged(error: Exception, name: str) -> RequestError:
    reason = str(error).partition("<")[0].strip() or type(error).__name__
    return RequestError(
        f"{name}: this is no picture that can be read ({reason[:120]}); give a whole file of the kind "
        f"{', '.join(FORMATS)}"
    )


def _eight_bits(image: "Image.Image") -> "Image.Image":
    """Return a picture in RGB: what is transparent lies on white, and 16 bits become 8."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        scaled = image.convert("F").point(lambda value: value * (255 / 65535) + 0.5)
        return scaled.convert("L").convert("RGB")
    if image.mode in ("I", "F"):  # of 0 to 255, as everywhere in Pillow; what is beyond is cut off
        return image.convert("L").convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layers = image if image.mode == "RGBA" else image.convert("RGBA")
        white: Image.Image = _pillow().new("RGB", layers.size, (255, 255, 255))
        white.paste(layers, mask=layers.getchannel("A"))
        return white
    return image.convert("RGB")


def upright(image: "Image.Image", orientation: int) -> "Image.Image":
    """Return a picture turned and mirrored as its EXIF orientation, 1 to 8, says."""
    turn = _pillow().Transpose
    turns = {2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE}
    turns |= {6: turn.ROTATE_270, 7: turn.TRANSVERSE, 8: turn.ROTATE_90}
    return image.transpose(turns[orientation]) if orientation in turns else image
