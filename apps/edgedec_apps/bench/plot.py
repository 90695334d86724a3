"""A benchmark as a picture: tokens per second by task, with drafts, without, and of llama.cpp where it was measured."""

from collections.abc import Mapping
from pathlib import Path

from edgedec_apps.bench.summary import Figures
from edgedec_apps.bench.table import heading
from edgedec_apps.plots import COLORS, label, picture

_GROUP_INCHES, _LEAST_INCHES, _MOST_INCHES, _HEIGHT_INCHES = 1.1, 8.0, 60.0, 4.5


def speeds_by_way(document: Figures) -> dict[str, dict[str, float | None]]:
    """Return the tokens per second in a benchmark's JSON object by way to decode, for each task and for "all".

    None stands for no speed; a way that was not measured is left out.
    """
    groups = {**document["tasks"], "all": document["all"]}
    ways = {
        f"edgedec, draft {document['draft']}": {name: each["tok_s"] for name, each in groups.items()},
        "edgedec, plain": {name: each["plain_tok_s"] for name, each in groups.items()},
    }
    for other, speeds in document["against"].items():
        for name, key in ((other, "tok_s"), (f"{other}, prompt lookup", "lookup_tok_s")):
            ways[name] = {task: each[key] for task, each in speeds["tasks"].items()} | {"all": speeds[key]}
    return {name: speeds for name, speeds in ways.items() if any(speeds.values())}


def noise_factor(noise: Mapping[str, float | None]) -> float | None:
    """Return by how much two measurements of the same work differed at most; None where there were none.

    >>> noise_factor({"lowest": 0.8, "highest": 1.1}), noise_factor({"lowest": None, "highest": None})
    (1.25, None)
    """
    lowest, highest = noise["lowest"], noise["highest"]
    return None if lowest is None or highest is None else max(highest, 1 / lowest)


def write_plot(path: Path, document: Figures) -> None:
    """Draw a benchmark's JSON object: a group of bars for each task and for all, with bars of noise.

    A bar of noise is the bar's value divided and multiplied by noise_factor: where two of them overlap, the difference
    may be noise.

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    drawn = speeds_by_way(document)
    groups = [*document["tasks"], "all"]
    factor = noise_factor(document["noise"])
    width = min(max(_LEAST_INCHES, _GROUP_INCHES * len(groups) * max(1, len(drawn)) / 2), _MOST_INCHES)
    with picture(path, (width, _HEIGHT_INCHES), heading(document)) as figure:
        axes = figure.subplots()
        for place, (way, speeds) in enumerate(drawn.items()):
            left = (place - (len(drawn) - 1) / 2) / (len(drawn) + 1)
            for group, name in enumerate(groups):
                if speed := speeds.get(name):
                    x, color = group + left, COLORS[place % len(COLORS)]
                    bar = axes.bar(x, speed, 1 / (len(drawn) + 1), color=color, edgecolor="white", label=label(way))
                    bar[0].set_gid(f"bar-{place}-{group}")
                    if factor is not None:
                        ends = ([speed - speed / factor], [speed * factor - speed])
                        lines = axes.errorbar(x, speed, yerr=ends, color="black", capsize=3, elinewidth=1).lines
                        lines[2][0].set_gid(f"noise-{place}-{group}")
                    top = speed * (factor or 1)
                    axes.annotate(f"{speed:.1f}", (x, top), (0, 2), textcoords="offset points", ha="center", size=7)
        axes.set_xticks(range(len(groups)), [label(name) for name in groups], rotation=0 if len(groups) < 9 else 30)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens per second, after the first token")
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        legend = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, frameon=False)
        axes.set_xlabel(_caption(factor), fontsize="small")


def _caption(factor: float | None) -> str:
    if factor is None:
        return "no two measurements of the same work to tell the noise by"
    return f"black: noise; two plain measurements of a task differed by up to {100 * (factor - 1):.1f} %"
