"""Quality against speed as a picture: in plain text, or with error bars in a file (the extra `plot`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from edgedec_apps.evaluation.settings import setting_name
from edgedec_apps.plots import COLORS, label, picture

_WIDTH, _HEIGHT = 60, 14  # characters of the plain picture
_INCHES = (9.0, 4.5)
_N_ERRORS = 2  # standard errors of an error bar, to either side
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
        top1_error, kl_error: Their standard errors; None where they are unknown.
        tok_s_range: Tokens per second of the slowest window and of the fastest.
    """

    mark: str
    name: str
    tok_s: float
    top1: float
    kl_mean: float
    top1_error: float | None = None
    kl_error: float | None = None
    tok_s_range: tuple[float, float] | None = None


def points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return a point for each row of an evaluation's JSON object that has a speed, the baseline first."""
    points = []
    for mark, (index, row) in zip(_marks(len(rows)), enumerate(rows), strict=True):
        settings = row["settings"]
        name = setting_name(settings["kv_type"], settings["layers"], settings["layer_skip"])
        if row["tok_s"] is not None:
            label = f"{name} (baseline)" if index == 0 else name
            errors = row["top1_error"], row["kl_error"]
            points.append(Point(mark, label, row["tok_s"], row["top1"], row["kl_mean"], *errors, row["tok_s_range"]))
    return points


def _marks(n: int) -> list[str]:
    """Return a letter for each of n points; those after z share a mark.

    >>> _marks(3), _marks(28)[-3:]
    (['a', 'b', 'c'], ['z', '+', '+'])
    """
    return [ascii_lowercase[i] if i < len(ascii_lowercase) else "+" for i in range(n)]


def text_plot(points: Sequence[Point]) -> list[str]:
    """Return the picture as lines: same top-1 upwards, tokens per second to the right, and the name of each letter."""
    if not points:
        return ["no speed was measured, so there is no picture; give a longer text or window"]
    low, high = _range([point.tok_s for point in points])
    bottom, top = _range([100 * point.top1 for point in points])
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for point in points:
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
    lines += [f"{point.mark}  {point.name}" for point in points]
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


def write_plot(path: Path, points: Sequence[Point], title: str) -> None:
    """Draw the settings: other top-1 than the baseline's, and mean KL divergence, each against tokens per second.

    All axes begin at zero: less is better upwards, more is better to the right. Bars are two standard errors to either
    side, and the slowest and the fastest window.

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    with picture(path, _INCHES, title) as figure:
        other, distance = figure.subplots(1, 2)
        for index, point in enumerate(points):
            _draw(other, point, 100 * (1 - point.top1), 100 * (point.top1_error or 0.0), f"top1-{index}")
            _draw(distance, point, point.kl_mean, point.kl_error or 0.0, f"kl-{index}")
        for axes, name in ((other, "other top-1 than the baseline, %"), (distance, "KL from the baseline, nats")):
            axes.set_xlabel("tokens per second")
            axes.set_ylabel(name)
            axes.set_xlim(0, 1.12 * max([(point.tok_s_range or (0, point.tok_s))[1] for point in points], default=1))
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        caption = "bars: ± 2 standard errors over the windows; the slowest and the fastest window"
        if points:
            handles, labels = other.get_legend_handles_labels()
            figure.legend(
                handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False, title=caption
            )


def _draw(axes: Any, point: Point, value: float, error: float, name: str) -> None:
    """Draw a point with its bars, under an id; the baseline, whose id ends in 0, is a square."""
    low, high = point.tok_s_range or (point.tok_s, point.tok_s)
    color = COLORS[ord(point.mark) % len(COLORS)]
    down = min(_N_ERRORS * error, value)  # a share, or a divergence, below zero means nothing
    bars = axes.errorbar(
        point.tok_s,
        value,
        xerr=([max(0.0, point.tok_s - low)], [max(0.0, high - point.tok_s)]),
        yerr=([down], [_N_ERRORS * error]),
        fmt="s" if name.endswith("-0") else "o",
        color=color,
        capsize=3,
        elinewidth=1,
        label=f"{point.mark}  {label(point.name)}",
    )
    for artist in bars.get_children():
        artist.set_clip_on(False)  # the baseline lies on the axis
    bars.lines[0].set_gid(f"point-{name}")
    bars.lines[2][0].set_gid(f"speed-{name}")
    bars.lines[2][1].set_gid(f"error-{name}")
    axes.annotate(point.mark, (point.tok_s, value), xytext=(5, 5), textcoords="offset points")
