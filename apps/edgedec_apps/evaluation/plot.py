"""Quality against speed as a picture: in plain text, or as a PNG with matplotlib (the extra `plot`)."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.extras import install_command
from edgedec_apps.cli.output_files import write_file
from edgedec_apps.evaluation.settings import setting_name

_WIDTH, _HEIGHT = 60, 14  # characters of the plain picture
_INCHES, _DOTS = (9.0, 4.5), 150
_SEVERAL = "*"


@dataclass(frozen=True, slots=True)
class Point:
    """A setting in the picture.

    Attributes:
        mark: The letter of the point.
        name: The name of the setting.
        tok_s: Tokens per second.
        top1: Share of positions with the baseline's most probable token.
        kl_mean: Mean KL divergence from the baseline, in nats.
    """

    mark: str
    name: str
    tok_s: float
    top1: float
    kl_mean: float


def points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return a point for each row of an evaluation's JSON object that has a speed, the baseline first."""
    found = []
    for mark, (index, row) in zip(_marks(len(rows)), enumerate(rows), strict=True):
        settings = row["settings"]
        name = setting_name(settings["kv_type"], settings["layers"], settings["layer_skip"])
        if row["tok_s"] is not None:
            named = f"{name} (baseline)" if index == 0 else name
            found.append(Point(mark, named, row["tok_s"], row["top1"], row["kl_mean"]))
    return found


def _marks(n: int) -> list[str]:
    """Return a letter for each of n points; those after z share a mark.

    >>> _marks(3), _marks(28)[-3:]
    (['a', 'b', 'c'], ['z', '+', '+'])
    """
    return [ascii_lowercase[i] if i < len(ascii_lowercase) else "+" for i in range(n)]


def text_plot(found: Sequence[Point]) -> list[str]:
    """Return the picture as lines: same top-1 upwards, tokens per second to the right, and the name of each letter."""
    if not found:
        return ["no speed was measured, so there is no picture; give a longer text or window"]
    low, high = _range([point.tok_s for point in found])
    bottom, top = _range([100 * point.top1 for point in found])
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for point in found:
        row = _HEIGHT - 1 - _place(100 * point.top1, bottom, top, _HEIGHT)
        column = _place(point.tok_s, low, high, _WIDTH)
        grid[row][column] = point.mark if grid[row][column] == " " else _SEVERAL
    labels = {0: f"{top:.1f} %", _HEIGHT - 1: f"{bottom:.1f} %"}
    width = max(map(len, labels.values()))
    lines = ["same top-1"]
    lines += [f"{labels.get(i, ''):>{width}} |{''.join(cells)}".rstrip() for i, cells in enumerate(grid)]
    left, right = f"{low:.1f}", f"{high:.1f} tok/s"
    lines.append(f"{'':{width}} +{'-' * _WIDTH}")
    lines.append(f"{'':{width}}  {left}{right:>{_WIDTH - len(left)}}")
    lines += [f"{point.mark}  {point.name}" for point in found]
    if any(_SEVERAL in cells for cells in grid):
        lines.append(f"{_SEVERAL}  several in one place")
    return lines


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: those of the values, or half a unit around values that are all the same."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _place(value: float, low: float, high: float, n: int) -> int:
    """Return the place of a value among n places from `low` to `high`.

    >>> _place(1.0, 1.0, 2.0, 10), _place(1.5, 1.0, 2.0, 11), _place(2.0, 1.0, 2.0, 10)
    (0, 5, 9)
    """
    return round((value - low) / (high - low) * (n - 1))


def require_png(path: Path) -> None:
    """Raise an error where no picture could be drawn, so that no work is done in vain.

    Raises:
        RequestError: The file does not end in .png.
        RuntimeUnavailableError: matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise RequestError(f"--plot-out {path}: pictures are PNGs; name a file that ends in .png")
    if find_spec("matplotlib") is None:
        raise RuntimeUnavailableError(
            "--plot-out needs the package 'matplotlib', which is not installed; install it with: "
            f"{install_command('plot')} (--plot needs no package)"
        )


def write_png(path: Path, found: Sequence[Point], title: str) -> None:
    """Draw the settings as a PNG of 1350 × 675: same top-1 and mean KL divergence, each against tokens per second.

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DOTS, layout="constrained")
    quality, distance = figure.subplots(1, 2)
    for index, point in enumerate(found):
        values = ((quality, 100 * point.top1), (distance, point.kl_mean))
        for axes, value in values:
            axes.plot(
                point.tok_s, value, "s" if index == 0 else "o", color=f"C{index}", label=f"{point.mark}  {point.name}"
            )
            axes.annotate(point.mark, (point.tok_s, value), xytext=(5, 5), textcoords="offset points")
    for axes, name in ((quality, "same top-1 as the baseline, %"), (distance, "KL divergence from the baseline, nats")):
        axes.set_xlabel("tokens per second")
        axes.set_ylabel(name)
        axes.margins(0.12)
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(title, fontsize="small", wrap=True)
    if found:
        handles, labels = quality.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
