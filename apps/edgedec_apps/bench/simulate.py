"""edgedec simulate: recorded drafts under other devices' cost curves, one way to draft or several side by side."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.cost_curve import CostCurve
from edgedec.counted import counted
from edgedec.errors import RequestError, StorageError
from edgedec.scheduler.recorder import Replay, replay
from edgedec.sequence import Evaluated
from edgedec_apps.bench.rooflines import DEVICES, modelled
from edgedec_apps.bench.rows import Recording, read_recording
from edgedec_apps.bench.table import columns
from edgedec_apps.cli.terminal import write_json, write_line

_HEADINGS = ("task", "tok/s", "plain", "speedup", "accepted/step")
_WAYS = ("way", "tok/s", "speedup", "accepted/step", "draft forwards")
_PLAIN = "plain"
_MOST_CURVE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """What forwards take on a device.

    Attributes:
        seconds: T(n) of the target.
        draft_model: T(n) of the draft model.
        source: Where they come from.
    """

    seconds: Callable[[int], float]
    draft_model: Callable[[int], float]
    source: str

    def price(self, made: Evaluated) -> float:
        """Return the seconds of a forward of drafting: some half-layers take their share of the whole target's time."""
        return self.draft_model(made.n_rows) if made.share is None else made.share * self.seconds(made.n_rows)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recording under a device's costs.

    Attributes:
        tasks: What came of each text, by task.
        n_forwards: Most forwards that drafting was given before a step.
    """

    tasks: Mapping[str, Sequence[Replay]]
    n_forwards: int

    @property
    def total(self) -> dict[str, Any]:
        """The figures over all texts."""
        return _figures([one for replays in self.tasks.values() for one in replays])


def simulate(paths: Sequence[Path], curve: str | None, *, n_max: int, as_json: bool) -> None:
    """Replay the drafts and print the expected speed, on one device or on every modelled one.

    Of one recording per task, of several side by side.

    Raises:
        RequestError: A recording or the curve is damaged, or recordings can't be compared.
        StorageError: A file can't be read.
    """
    if n_max < 1:
        raise RequestError(f"--draft-max is {n_max}; it must be at least 1")
    recordings = [read_recording(path) for path in paths]
    devices = [curve] if curve else list(DEVICES)
    if len(paths) == 1:
        found = [_document(recordings[0], name, n_max) for name in devices]
    else:
        ways = _comparable(paths, recordings)
        found = [_comparison(ways, name, n_max) for name in devices]
    if as_json:
        write_json(found[0] if curve else found)
        return
    charged = all(recording.charged for recording in recordings)
    write_line(f"{recordings[0].model} · {'drafting charged' if charged else 'drafting time left out'}")
    for document in found:
        write_line("")
        write_line(document["curve"])
        for line in _compared(document) if len(paths) > 1 else _by_task(document, tasks=curve is not None):
            write_line(line)


def _document(recording: Recording, curve: str, n_max: int) -> dict[str, Any]:
    costs = read_costs(curve, recording)
    found = replayed(recording, costs, n_max)
    return {
        "model": recording.model,
        "curve": costs.source,
        "drafting_charged": recording.charged,
        "n_forwards": found.n_forwards,
        "all": found.total,
        "tasks": {task: _figures(replays) for task, replays in found.tasks.items()},
    }


def _comparison(ways: Mapping[str, Recording], curve: str, n_max: int) -> dict[str, Any]:
    """Return the figures of every way on a device, plain decoding's first, and which is the fastest."""
    figures: dict[str, dict[str, Any]] = {}
    sources = []
    for way, recording in ways.items():
        costs = read_costs(curve, recording)
        sources.append(costs.source)
        found = replayed(recording, costs, n_max)
        whole = found.total
        tasks = {task: _figures(replays)["speedup"] for task, replays in found.tasks.items()}
        if not figures:
            figures[_PLAIN] = _way(whole["plain_tok_s"], 1.0, 0.0, 0, dict.fromkeys(tasks, 1.0))
        figures[way] = _way(whole["tok_s"], whole["speedup"], whole["accepted_per_step"], found.n_forwards, tasks)
    return {
        "model": next(iter(ways.values())).model,
        "curve": max(sources, key=len),  # one that speaks of a draft model, where there is one
        "ways": figures,
        "best": max(figures, key=lambda way: float(figures[way]["speedup"])),
        "best_by_task": {task: max(figures, key=lambda way: float(figures[way]["tasks"][task])) for task in tasks},
    }


def _way(tok_s: float, speedup: float, accepted: float, n_forwards: int, tasks: Mapping[str, float]) -> dict[str, Any]:
    return {
        "tok_s": tok_s,
        "speedup": speedup,
        "accepted_per_step": accepted,
        "n_forwards": n_forwards,
        "tasks": tasks,
    }


def _comparable(paths: Sequence[Path], recordings: Sequence[Recording]) -> dict[str, Recording]:
    """Return the recordings by the names of their files.

    Raises:
        RequestError: Two are of several models or texts, or share a name, or one does not say what drafting evaluated.
    """
    found: dict[str, Recording] = {}
    first = recordings[0]
    for path, recording in zip(paths, recordings, strict=True):
        if not recording.charged:
            raise RequestError(
                f"{path} does not say what drafting evaluated, so it would look free beside the others; "
                "record it again with edgedec bench --rows"
            )
        if recording.size != first.size or _texts(recording) != _texts(first):
            raise RequestError(
                f"{path} holds other texts, or another model's, than {paths[0]}; "
                "record both with the same model, prompts and sampling options"
            )
        if path.stem in found or path.stem == _PLAIN:
            raise RequestError(f"{path}: its name stands for another way already; give every recording its own name")
        found[path.stem] = recording
    return found


def _texts(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    return [(text.id, text.token_ids) for text in recording.texts]


def replayed(recording: Recording, costs: Costs, n_max: int) -> Replayed:
    """Replay every text with the number of forwards before a step that makes the recording's texts the fastest.

    Drafters that make forwards are given at least one: without any it would be another way to draft.
    """
    rows = [row for text in recording.texts for row in text.proposals]
    most = max((len(row.evaluated) for row in rows), default=0)
    found = [_replayed(recording, costs, n_max, n) for n in range(min(1, most), min(most, n_max) + 1)]
    return max(found, key=lambda one: float(one.total["tok_s"]))


def _replayed(recording: Recording, costs: Costs, n_max: int, n_forwards: int) -> Replayed:
    tasks: dict[str, list[Replay]] = {}
    for text in recording.texts:
        one = replay(text.token_ids, text.proposals, costs.seconds, n_max, costs.price, n_forwards)
        tasks.setdefault(text.task, []).append(one)
    return Replayed(tasks, n_forwards)


def read_costs(curve: str, recording: Recording) -> Costs:
    """Return the costs of a modelled device, or those in a file that edgedec bench --curve-out wrote.

    Such a file says nothing of a draft model: it is taken to cost what its bytes are of the target's.

    Raises:
        RequestError: It is neither.
        StorageError: The file can't be read.
    """
    size = recording.size
    drafts = recording.draft_model or size
    if curve in DEVICES:
        device = DEVICES[curve]
        seconds = modelled(device, size.n_bytes, size.n_params)
        draft_model = modelled(device, drafts.n_bytes, drafts.n_params)
        return Costs(seconds, draft_model, f"{curve}, MODELLED from a roofline ({device.basis})")
    measured = _read_curve(curve)
    by_bytes = drafts.n_bytes / size.n_bytes
    source = f"measured, {Path(curve).name}"
    if recording.draft_model is not None:
        source += "; a draft model's is that by its bytes"

    def seconds_of(n: int) -> float:
        return measured.seconds(n) or float(n)

    return Costs(seconds_of, lambda n: by_bytes * seconds_of(n), source)


def _read_curve(name: str) -> CostCurve:
    path = Path(name)
    if not path.exists():
        raise RequestError(f"--curve {name!r} is no file and no device; modelled devices: {', '.join(DEVICES)}")
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_CURVE_BYTES))  # a device has no end; what is cut short is no JSON
        points = {int(n): float(seconds) for n, seconds in found["curve"].items()}
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path} is no curve; edgedec bench --curve-out writes one") from error
    if not points or not all(n >= 1 and 0 < seconds < 1e9 for n, seconds in points.items()):
        raise RequestError(f"{path} is no curve; edgedec bench --curve-out writes one")
    return CostCurve(points)


def _figures(replays: Sequence[Replay]) -> dict[str, Any]:
    n_tokens, n_steps = sum(found.n_tokens for found in replays), sum(found.n_steps for found in replays)
    seconds, plain_s = sum(found.seconds for found in replays), sum(found.plain_s for found in replays)
    return {
        "tok_s": n_tokens / seconds if seconds else 0.0,
        "plain_tok_s": n_tokens / plain_s if plain_s else 0.0,
        "speedup": plain_s / seconds if seconds else 1.0,
        "accepted_per_step": n_tokens / n_steps - 1 if n_steps else 0.0,
    }


def _by_task(document: Mapping[str, Any], *, tasks: bool) -> list[str]:
    named = document["tasks"] if tasks else {}
    rows = [
        (task, *_shown(found, "tok_s", "plain_tok_s", "speedup", "accepted_per_step"))
        for task, found in {**named, "all": document["all"]}.items()
    ]
    n = document["n_forwards"]
    return [*columns([_HEADINGS, *rows]), *([f"at most {counted(n, 'forward')} of drafting a step"] if n else [])]


def _compared(document: Mapping[str, Any]) -> list[str]:
    """Return the table of ways, with the speedup by task, and the best over all and where that is another one."""
    ways, best = document["ways"], document["best"]
    tasks = list(ways[_PLAIN]["tasks"])
    rows = [
        (
            way,
            *_shown(found, "tok_s", "speedup", "accepted_per_step"),
            str(found["n_forwards"] or "-"),
            *_shown(found["tasks"], *tasks),
        )
        for way, found in ways.items()
    ]
    others = [f"{task}: {way}" for task, way in document["best_by_task"].items() if way != best]
    return [*columns([(*_WAYS, *tasks), *rows]), " · ".join([f"best: {best}", *others])]


def _shown(found: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(f"{found[name]:.1f}" if name.endswith("tok_s") else f"{found[name]:.2f}" for name in names)
