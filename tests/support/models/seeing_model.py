"""A tiny model with a tiny projector beside it, and pictures to show it; the encoder is libmtmd's."""

import io
from base64 import b64encode
from pathlib import Path

from support.models.tiny_models import CHATML, tiny_llama
from support.models.tiny_projectors import tiny_projector


def seeing_model(folder: Path, name: str = "seeing") -> Path:
    """Write a random model and its projector into a folder, and return the model's path."""
    tiny_projector(folder / f"mmproj-{name}.gguf", "idefics3")
    return tiny_llama(folder / f"{name}.gguf", chat_template=CHATML, n_ctx_train=4096)


def picture(color: str = "red", size: tuple[int, int] = (48, 40)) -> bytes:
    """Return a PNG of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def base64_of(color: str = "red") -> str:
    """Return a PNG of one colour in base64."""
    return b64encode(picture(color)).decode()


def data_url(color: str = "red") -> str:
    """Return a PNG of one colour as a data: URL."""
    return f"data:image/png;base64,{base64_of(color)}"
