"""Plots of measurements, drawn with matplotlib (the extra `plot`) into a file: SVG or PNG, by the file's ending.

Texts in an SVG stay texts, and each drawn thing can have an id (`gid` in matplotlib), so that a test or a reader can
find a figure again. All axes of quantities begin at zero and name their unit.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import catch_warnings, filterwarnings

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.plugins import install_command
from edgedec_apps.cli.output_files import require_writable, write_file
from edgedec_apps.cli.shown.terminal import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
"""Colors that color-blind people can tell apart (Okabe & Ito 2008, Color Universal Design)."""

_DOTS = 150
_KINDS = (".svg", ".png")
_SETTINGS = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "edgedec",  # the same figures give the same file
    "text.parse_math": False,  # a dollar in a model's name is a dollar
    "font.size": 9.0,
    "axes.formatter.useoffset": False,  # the numbers at an axis are what they are
    "axes.formatter.limits": (-9, 12),
}


def require_picture(path: Path | None) -> None:
    """Raise an error where no picture could be drawn, so that no work is done in vain; None wants no picture.

    Raises:
        RequestError: The file ends in neither .svg nor .png.
        RuntimeUnavailableError: matplotlib is not installed.
        StorageError: The file can't be written.
    """
    if path is None:
        return
    if path.suffix.lower() not in _KINDS:
        raise RequestError(f"--plot {path}: a picture is an SVG or a PNG; name a file that ends in .svg or .png")
    if find_spec("matplotlib") is None:
        raise RuntimeUnavailableError(
            f"--plot needs the package 'matplotlib', which is not installed; install it with: {install_command('plot')}"
        )
    require_writable(path)


@contextmanager
def picture(path: Path, inches: tuple[float, float], title: str) -> Iterator["Figure"]:
    """Yield an empty figure of so many inches, and write it when the block ends: whole, or not at all.

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    import matplotlib
    from matplotlib.figure import Figure

    kind = path.suffix.lower().removeprefix(".")
    data = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS), catch_warnings():  # type: ignore[arg-type]  # its keys are literals
        filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=inches, dpi=_DOTS, layout="constrained")
        figure.suptitle(label(title), fontsize="medium", wrap=True)
        yield figure
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_file(path, data.getvalue())


def label(text: object) -> str:
    """Return a name from a user's file as a label of one line, without characters that an SVG can't hold.

    >>> label("a\\nb\\x00")
    'a␊b␀'
    """
    return one_line(text)
