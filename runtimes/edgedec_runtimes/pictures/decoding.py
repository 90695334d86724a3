"""Decoding of pictures with Pillow, in the child process: a decoder that fails, hangs or ends takes nobody with it."""

import io
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from edgedec.errors import EdgedecError, RequestError, RuntimeUnavailableError
from edgedec.plugins import install_command
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.limits import FORMATS, Limits, halved

if TYPE_CHECKING:
    from PIL import Image

_ORIENTATION = 0x0112
_TURNED = 5  # orientations from here on swap width and height


def decoder_version() -> str:
    """Return the name and version of the decoder (RuntimeUnavailableError where Pillow is not installed)."""
    _pillow()
    return f"Pillow {version('pillow')}"


def measure(data: bytes, limits: Limits, name: str) -> tuple[int, int]:
    """Return width and height of the picture that decode() returns, from the file's header alone.

    Raises:
        RequestError: The file is no picture, is damaged, or is beyond the limits.
        RuntimeUnavailableError: Pillow is not installed.
    """
    image, orientation = _opened(data, limits, name)
    width, height = halved(*image.size)
    return (height, width) if orientation >= _TURNED else (width, height)


def decode(data: bytes, limits: Limits, name: str) -> Picture:
    """Return the pixels of a picture's file: its first frame, turned as its EXIF data say, on white, in 8 bits.

    Raises what measure() raises.
    """
    image, orientation = _opened(data, limits, name)
    size = halved(*image.size)
    try:
        if size != image.size and image.format == "JPEG":
            image.draft("RGB", size)
        image.load()
        if image.size != size:
            image = _eight_bits(image).reduce(2)
        found = upright(_eight_bits(image), orientation)
        return Picture(*found.size, found.tobytes())
    except Exception as error:
        raise _damaged(error, name) from error


def of_image(image: Any, limits: Limits, name: str) -> Picture:
    """Return the pixels of a PIL.Image that the application made (RequestError beyond the limits)."""
    width, height = image.size
    limits.require_size(width, height, name)
    orientation = image.getexif().get(_ORIENTATION, 1)
    found = upright(_eight_bits(image), orientation if isinstance(orientation, int) else 1)
    return Picture(*found.size, found.tobytes())


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise RuntimeUnavailableError(f"pictures are decoded by Pillow: {install_command('images')}") from error
    return Image


def _opened(data: bytes, limits: Limits, name: str) -> tuple["Image.Image", int]:
    """Return a picture whose header was read and is within the limits, and its EXIF orientation."""
    limits.require_bytes(len(data), name)
    pillow = _pillow()
    pillow.MAX_IMAGE_PIXELS = None  # the limits are checked below, before a pixel is decoded
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        limits.require_size(width, height, name, is_jpeg=image.format == "JPEG")
        exif = pillow.Exif()
        found = image.info.get("exif")
        if isinstance(found, bytes):
            exif.load(found)
        orientation = exif.get(_ORIENTATION, 1)
    except EdgedecError:
        raise
    except Exception as error:
        raise _damaged(error, name) from error
    return image, orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


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
    if image.mode.startswith("I") or image.mode == "F":  # grey in 16 or 32 bits
        scaled = image.convert("F") if image.mode != "F" else image
        extremes: Any = scaled.getextrema()
        high = 255.0 if extremes[1] <= 255 else 65535.0
        return scaled.point(lambda value: value * (255.0 / high) + 0.0).convert("L").convert("RGB")
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
