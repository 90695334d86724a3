"""Fit and judge the chance that a token of a completion is right, which `--method stop-unsure` ends texts by.

    python benchmarks/answers/stop_unsure.py read qwen2.5-coder-0.5b --work FOLDER  (for each model; goes on if stopped)
    python benchmarks/answers/stop_unsure.py fit --work FOLDER --json-out benchmarks/results/stop_unsure.json

`read` lets a model read Python source files: of the standard library, of installed packages, and of this repository,
which no model was trained on. At every position it notes the token that greedy decoding writes there and the one that
default sampling draws, what the row of logits says about each (edgedec_methods.unsure), and the file's own token.

`fit` fits the logistic function on the greedy tokens of two of three files of the standard library and of the packages,
for each model and for all together, and judges it on the other files. It reports how well single tokens are told apart,
from which entropy on AdaDec pauses, and what a user of completions sees: from every 8th position a line is completed,
and is right where the tokens shown are the file's. Up to its first wrong token a completion is the file's text, so no
text is generated for that. Prints the coefficients; ends with one line of JSON.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec.storage.whole_file import write_atomically
from edgedec_apps.bench.provenance import provenance
from edgedec_methods.adadec import fitted_threshold
from edgedec_methods.arbitrage import logistic_weights
from edgedec_methods.unsure import Doubt, Fit

_PACKAGES = "jinja2", "huggingface_hub", "starlette", "rich", "matplotlib", "click", "httpx", "networkx", "uvicorn"
_FILES = {"library": 48, "packages": 30, "repository": 24}
_WINDOW, _BEGIN, _ROWS = 512, 128, 64  # tokens of a file; those that are only context; rows of a forward
_EVERY, _LONGEST = 8, 32  # a completion begins at each so manieth token; its most tokens
_THRESHOLDS = 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9
_RIDGE = 1e-3
_CUTS = "line", "lines", "whole_lines"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Found:
    """What a model wrote over one file; n positions.

    Attributes:
        source: "library", "packages" or "repository".
        held_out: Whether the file is only judged on.
        greedy: f64[n, 4], of the most probable token: whether it is the file's, p, entropy and margin.
        drawn: f64[n, 4], the same of a token that default sampling draws.
        line_end: bool[n], whether the file's token ends a line.
    """

    source: str
    held_out: bool
    greedy: Floats
    drawn: Floats
    line_end: NDArray[np.bool_]


def files_of(source: str) -> list[tuple[str, Path]]:
    """Return names and paths of a source's files, evenly spaced in the order of their names, for a text of a window."""
    if source == "library":
        folders = [Path(sysconfig.get_paths()["stdlib"])]
    elif source == "packages":
        specs = [spec for spec in map(find_spec, _PACKAGES) if spec is not None]
        folders = [Path(place) for spec in specs for place in spec.submodule_search_locations or []]
    else:
        folders = [Path(__file__).parents[2] / "edgedec", Path(__file__).parents[2] / "runtimes"]
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder.parent)
            if not {"site-packages", "test", "tests", "idlelib", "__pycache__"} & set(inside.parts[1:]):
                found.append((str(inside), path))
    found = [(name, path) for name, path in found if path.stat().st_size > 4 * _WINDOW]
    places = np.linspace(0, len(found) - 1, min(len(found), _FILES[source])).round().astype(int)
    return [found[i] for i in dict.fromkeys(places.tolist())]


def read(args: argparse.Namespace) -> None:
    """Let a model read all files, and keep what it found in one file for each."""
    folder = args.work / args.model
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(source, i, *file) for source in _FILES for i, file in enumerate(files_of(source))]
    missing = [job for job in jobs if not (folder / f"{job[0]}-{job[1]}.npz").exists()]
    if not missing:
        return
    with edgedec.load(
        args.model, offline=True, draft="off", n_ctx=_WINDOW, drafting=DraftOptions(max_rows=_ROWS)
    ) as engine:
        for number, (source, i, name, path) in enumerate(missing):
            print(f"{number + 1} of {len(missing)}: {name}", file=sys.stderr)
            values = _read_file(engine, path.read_text(encoding="utf-8", errors="replace"))
            if values is None:
                continue
            values["card"] = np.array([engine.card.architecture, engine.card.n_layer, engine.card.n_embd])
            values["name"] = np.array(name)
            with (folder / f"{source}-{i}.partial").open("wb") as file:
                np.savez(file, **values)  # type: ignore[arg-type]  # an array is no option of savez
            (folder / f"{source}-{i}.partial").replace(folder / f"{source}-{i}.npz")


def _read_file(engine: edgedec.Engine, text: str) -> dict[str, NDArray[Any]] | None:
    """Return what a model writes over the first tokens of a text; None where the text has too few."""
    token_ids = np.array(engine.tokenizer.encode(text[: 16 * _WINDOW])[:_WINDOW], np.int32)
    if len(token_ids) < _WINDOW:
        return None
    params, noise = SamplingParams(seed=0), Noise(0)
    greedy: list[tuple[float, ...]] = []
    drawn: list[tuple[float, ...]] = []
    with closing(engine.session(_WINDOW)) as session:
        session.forward(token_ids[:_BEGIN], n_past=0)
        for begin in range(_BEGIN, _WINDOW, _ROWS):
            forward = session.forward(token_ids[begin : begin + _ROWS], n_past=begin, rows="all")
            for at, row in enumerate(forward.logits[: _WINDOW - 1 - begin], start=begin + 1):
                for token, found in (
                    (forward.ops.argmax(row), greedy),
                    (draw(row, params, (), noise, at, forward.ops), drawn),
                ):
                    doubt = Doubt.of(row, token, forward.ops)
                    found.append((token == token_ids[at], doubt.p, doubt.entropy, doubt.margin))
    ends = [b"\n" in engine.tokenizer.piece(int(token)) for token in token_ids[_BEGIN + 1 :]]
    return {"greedy": np.array(greedy, float), "drawn": np.array(drawn, float), "line_end": np.array(ends)}


def load(folder: Path) -> list[Found]:
    """Return what a model found in all files."""
    result = []
    for path in sorted(folder.glob("*.npz")):
        source, _, number = path.stem.partition("-")
        with np.load(path) as arrays:
            held_out = source == "repository" or int(number) % 3 == 0
            result.append(Found(source, held_out, arrays["greedy"], arrays["drawn"], arrays["line_end"]))
    return result


def shape_of(folder: Path) -> list[str | int]:
    """Return architecture, layers and values of a hidden state of the model whose results lie in a folder."""
    with np.load(next(folder.glob("*.npz"))) as arrays:
        architecture, *sizes = arrays["card"].tolist()
    return [architecture, *map(int, sizes)]


def signs(rows: Floats) -> Floats:
    """Return f64[n, 4], what the coefficients of a Fit are multiplied with, for rows of Found.greedy or Found.drawn."""
    doubts = [Doubt(*row[1:]) for row in rows.tolist()]
    return np.array([(1.0, doubt.log_odds, doubt.entropy, doubt.margin) for doubt in doubts])


def fitted(files: Sequence[Found]) -> Fit:
    """Return the coefficients of the highest likelihood on the greedy and the drawn tokens of files, by Newton."""
    rows = np.concatenate([part for file in files for part in (file.greedy, file.drawn)])
    weights = logistic_weights(signs(rows), rows[:, 0], np.full(4, _RIDGE))
    return Fit(*weights.round(3).tolist())


def chances(rows: Floats, fit: Fit) -> Floats:
    """Return f64[n], the chance that each token is right."""
    result: Floats = 1 / (1 + np.exp(-signs(rows) @ np.array(list(asdict(fit).values()))))
    return result


def of_tokens(files: Sequence[Found], fit: Fit | None, *, drawn: bool = False) -> dict[str, Any]:
    """Return how well single tokens are judged; without a fit the chance is the model's own probability.

    `precision` is the share of tokens called wrong (a chance below the threshold) that are wrong, `recall` the share of
    the wrong ones that are called so.
    """
    rows = np.concatenate([file.drawn if drawn else file.greedy for file in files])
    right, chance = rows[:, 0] > 0, rows[:, 1] if fit is None else chances(rows, fit)
    held = chance.clip(1e-6, 1 - 1e-6)
    by_threshold = {}
    for least in _THRESHOLDS:
        called = chance < least
        by_threshold[str(least)] = {
            "called_wrong": round(float(called.mean()), 4),
            "precision": round(float((~right & called).sum() / max(1, called.sum())), 4),
            "recall": round(float((~right & called).sum() / max(1, (~right).sum())), 4),
        }
    bins = np.minimum((chance * 10).astype(int), 9)
    calibration = {
        f"{b / 10:.1f}": [int((bins == b).sum()), round(float(chance[bins == b].mean()), 4), round(float(s.mean()), 4)]
        for b in range(10)
        if len(s := right[bins == b])
    }
    return {
        "n_tokens": len(right),
        "right": round(float(right.mean()), 4),
        "log_loss": round(float(-np.where(right, np.log(held), np.log(1 - held)).mean()), 4),
        "auc": round(auc(chance, right), 4),
        "thresholds": by_threshold,
        "calibration_n_mean_right": calibration,
    }


def auc(scores: Floats, right: NDArray[np.bool_]) -> float:
    """Return the chance that a right token has a higher score than a wrong one."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    return float((ranks[right].sum() - n_right * (n_right + 1) / 2) / max(1, n_right * n_wrong))


def of_completions(files: Sequence[Found], fit: Fit, least: float, cut: str) -> dict[str, float]:
    """Return what a user sees of greedy completions that end before the first token with a chance below `least`.

    Args:
        files: What a model found.
        fit: Says the chance.
        least: 0 never ends a completion.
        cut: "line" completes a line and ends it at the token. "lines" completes up to _LONGEST tokens and ends them at
            the token; "whole_lines" ends them after the last whole line before the token.

    Returns:
        Of all completions the share that shows a token; of these the share where all that is shown is the file's; the
        file's tokens shown in a completion, on the average; the share of completions right without an end that are
        still whole.
    """
    n = n_shown = n_right = n_tokens = n_whole = n_could = 0
    for file in files:
        right, sure = file.greedy[:, 0] > 0, chances(file.greedy, fit) >= least
        ends = np.flatnonzero(file.line_end)
        for begin in range(0, len(right) - _LONGEST, _EVERY):
            end = begin + _LONGEST
            if cut == "line":
                end = min(end, *(ends[ends >= begin][:1] + 1).tolist(), len(right))
            first_wrong = _first(~right, begin, end)
            shown = _first(~sure, begin, end)
            if cut == "whole_lines" and shown < end:
                shown = max((ends[(ends >= begin) & (ends < shown)] + 1).tolist(), default=begin)
            n, n_could, n_whole = n + 1, n_could + (first_wrong == end), n_whole + (first_wrong == shown == end)
            n_shown, n_right = n_shown + (shown > begin), n_right + (begin < shown <= first_wrong)
            n_tokens += min(shown, first_wrong) - begin
    return {
        "shown": round(n_shown / n, 4),
        "right_of_shown": round(n_right / max(1, n_shown), 4),
        "right_tokens": round(n_tokens / n, 3),
        "whole_of_right": round(n_whole / max(1, n_could), 4),
    }


def _first(where: NDArray[np.bool_], begin: int, end: int) -> int:
    """Return the first true place from `begin` to `end`; `end` where there is none."""
    found = np.flatnonzero(where[begin:end])
    return begin + int(found[0]) if len(found) else end


def judged(files: Sequence[Found], fit: Fit) -> dict[str, Any]:
    """Return how a fit judges held-out files, by source."""
    result = {}
    for source in _FILES:
        some = [file for file in files if file.source == source and file.held_out]
        cuts = {cut: {str(p): of_completions(some, fit, p, cut) for p in (0, *_THRESHOLDS)} for cut in _CUTS}
        result[source] = {
            "files": len(some),
            "greedy": of_tokens(some, fit),
            "drawn": of_tokens(some, fit, drawn=True),
            "by_probability_alone": of_tokens(some, None),
            "completions": cuts,
        }
    return result


def paused(files: Sequence[Found]) -> dict[str, float]:
    """Return AdaDec's threshold in bits, and how well it, and one bit, tell right from wrong tokens, weighed alike."""
    learned, tested = (np.concatenate([f.greedy for f in files if f.held_out is held]) for held in (False, True))
    bits, right = round(fitted_threshold(learned[:, 2], learned[:, 0] > 0), 2), tested[:, 0] > 0
    told = [(np.mean(tested[right, 2] < at) + np.mean(tested[~right, 2] >= at)) / 2 for at in (bits, 1.0)]
    return {"bits": bits, "told apart": round(float(told[0]), 3), "by one bit": round(float(told[1]), 3)}


def fit_all(args: argparse.Namespace) -> None:
    """Fit all models, judge the fits, print the coefficients and write the result."""
    found = {folder.name: load(folder) for folder in sorted(args.work.iterdir()) if folder.is_dir()}
    learned = {name: [file for file in files if not file.held_out] for name, files in found.items()}
    own = {name: fitted(files) for name, files in learned.items()}
    together = fitted([file for name in args.together for file in learned[name]])
    result: dict[str, Any] = provenance() | {"fits": {name: asdict(fit) for name, fit in own.items()}}
    result |= {"shapes": {name: shape_of(args.work / name) for name in found}}
    result["adadec"] = {name: paused(files) for name, files in found.items()}
    print(f"AdaDec's thresholds: {result['adadec']}")
    result |= {"together": list(args.together), "general_fit": asdict(together), "judged": {}}
    for name, files in found.items():
        others = {other: fit for other, fit in own.items() if other != name}
        tested = [file for file in files if file.held_out]
        result["judged"][name] = {
            "by_its_own_fit": judged(files, own[name]),
            "log_loss_by_fit": {
                fit_name: of_tokens(tested, fit)["log_loss"]
                for fit_name, fit in {"own": own[name], "general": together, **others}.items()
            },
            "repository_by_the_general_fit": {
                str(p): of_completions([f for f in tested if f.source == "repository"], together, p, "line")
                for p in _THRESHOLDS
            },
        }
        print(f"{name}: {own[name]}")
    print(f"general: {together}")
    line = json.dumps(result)
    print(line)
    if args.json_out is not None:
        write_atomically(args.json_out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for_reading = actions.add_parser("read")
    for_reading.add_argument("model")
    for_fitting = actions.add_parser("fit")
    for_fitting.add_argument("--json-out", type=Path)
    models = ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    for_fitting.add_argument("--together", nargs="+", default=models, help="the models of the general fit")
    for each in (for_reading, for_fitting):
        each.add_argument("--work", type=Path, required=True, help="a folder for what the models found")
    arguments = parser.parse_args()
    if arguments.action == "read":
        read(arguments)
    else:
        fit_all(arguments)
