"""Replays recorded drafts with the forward times of another device: would speculation be faster there?

    edgedec bench MODEL --rows ROWS.jsonl
    python benchmarks/speed/simulate.py ROWS.jsonl --curve raspberry-pi-5

For several recordings of the same texts, a table for each device says which way to draft is the fastest there. The
time of drafting counts: a forward through some of the layers by their bytes, a draft model's by its own bytes. With
--delay-ms each forward of the target waits for another machine, and a draft model's does not: drafts pay more.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recordings import Recording, read_recording
from replay import Replay, replay
from rooflines import DEVICES, modelled

from edgedec.cost_curve import CostCurve
from edgedec.errors import EdgedecError, RequestError, counted
from edgedec.load_options import N_DRAFT_MAX
from edgedec_apps.bench.recorder import Evaluated
from edgedec_apps.bench.table import columns
from edgedec_apps.texts import read_text

_HEADINGS = ("task", "tok/s", "plain", "speedup", "accepted/step")
_WAYS = ("way", "tok/s", "speedup", "accepted/step", "draft forwards")
_PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of forwards on a device.

    Attributes:
        seconds: T(n), the seconds of the target's forward of n tokens.
        draft_model: The same for the draft model.
        source: The source of these times, for a person.
        resume_s: Seconds that the first plain step after a draft takes longer.
        delay_s: Seconds that every forward of the target waits for another machine; part of `seconds`.
    """

    seconds: Callable[[int], float]
    draft_model: Callable[[int], float]
    source: str
    resume_s: float = 0.0
    delay_s: float = 0.0

    def price(self, made: Evaluated) -> float:
        """Return the seconds of a forward that drafted: of the draft model, or of a share of the target's layers."""
        if made.share is None:
            return self.draft_model(made.n_rows)  # which is on this machine
        return made.share * (self.seconds(made.n_rows) - self.delay_s) + self.delay_s

    def delayed(self, delay_s: float) -> "Costs":
        """Return the times where every forward of the target waits `delay_s` seconds for another machine."""
        if not delay_s:
            return self
        source = f"{self.source}; {delay_s * 1000:g} ms more for each forward of the target"
        return replace(self, seconds=lambda n: self.seconds(n) + delay_s, source=source, delay_s=delay_s)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recording, replayed with the times of a device.

    Attributes:
        tasks: The replay of each text, by task.
        n_forwards: The most forwards that the drafter may make before a step.
    """

    tasks: Mapping[str, Sequence[Replay]]
    n_forwards: int

    @property
    def total(self) -> dict[str, Any]:
        """The figures of all texts together."""
        return _figures([one for replays in self.tasks.values() for one in replays])


def simulate(paths: Sequence[Path], curve: str | None, *, n_max: int, delay_s: float, as_json: bool) -> None:
    """Replay recorded drafts and print the expected speed, on one device or on every modelled one.

    One recording is shown by task; several recordings are compared.

    Raises:
        RequestError: A recording or the curve is damaged, or the recordings can't be compared.
        StorageError: A file can't be read.
    """
    if n_max < 1:
        raise RequestError(f"--draft-max is {n_max}; it must be at least 1")
    if not 0 <= delay_s < math.inf:
        raise RequestError(f"--delay-ms is {1000 * delay_s:g}; it must be at least 0")
    recordings = [read_recording(path) for path in paths]
    devices = [curve] if curve else list(DEVICES)
    if len(paths) == 1:
        found = [_document(recordings[0], name, n_max, delay_s) for name in devices]
    else:
        ways = _comparable(paths, recordings)
        found = [_comparison(ways, name, n_max, delay_s) for name in devices]
    if as_json:
        print(json.dumps(found[0] if curve else found))
        return
    charged = all(recording.charged for recording in recordings)
    print(f"{recordings[0].model} · {'with the time of drafting' if charged else 'without the time of drafting'}")
    for document in found:
        print()
        print(document["curve"])
        for line in _compared(document) if len(paths) > 1 else _by_task(document, tasks=curve is not None):
            print(line)


def _document(recording: Recording, curve: str, n_max: int, delay_s: float) -> dict[str, Any]:
    costs = read_costs(curve, recording).delayed(delay_s)
    found = replayed(recording, costs, n_max)
    return {
        "model": recording.model,
        "curve": costs.source,
        "drafting_charged": recording.charged,
        "n_forwards": found.n_forwards,
        "all": found.total,
        "tasks": {task: _figures(replays) for task, replays in found.tasks.items()},
    }


def _comparison(ways: Mapping[str, Recording], curve: str, n_max: int, delay_s: float) -> dict[str, Any]:
    """Return the figures of every way to draft on a device, plain decoding first, and the fastest ways."""
    figures: dict[str, dict[str, Any]] = {}
    sources = []
    for way, recording in ways.items():
        costs = read_costs(curve, recording).delayed(delay_s)
        sources.append(costs.source)
        found = replayed(recording, costs, n_max)
        speedups = {task: _figures(replays)["speedup"] for task, replays in found.tasks.items()}
        whole = found.total
        if not figures:
            plain = {"tok_s": whole["plain_tok_s"], "speedup": 1.0, "accepted_per_step": 0.0, "n_forwards": 0}
            figures[_PLAIN] = plain | {"tasks": dict.fromkeys(speedups, 1.0)}
        whole.pop("plain_tok_s")
        figures[way] = whole | {"n_forwards": found.n_forwards, "tasks": speedups}
    return {
        "model": next(iter(ways.values())).model,
        "curve": max(sources, key=len),  # the source that names a draft model, where there is one, is the longest
        "ways": figures,
        "best": max(figures, key=lambda way: float(figures[way]["speedup"])),
        "best_by_task": {task: max(figures, key=lambda way: float(figures[way]["tasks"][task])) for task in speedups},
    }


def _comparable(paths: Sequence[Path], recordings: Sequence[Recording]) -> dict[str, Recording]:
    """Return the recordings by the names of their files.

    Raises:
        RequestError: Two recordings have different models or texts, or the same name, or one lacks the forwards that
            drafting made.
    """
    found: dict[str, Recording] = {}
    first = recordings[0]
    for path, recording in zip(paths, recordings, strict=True):
        if not recording.charged:
            raise RequestError(
                f"{path} lacks the forwards that drafting made, so that drafting would seem to cost nothing; "
                "record it again with edgedec bench --rows"
            )
        if recording.size != first.size or _texts(recording) != _texts(first):
            raise RequestError(
                f"{path} holds other texts than {paths[0]}, or those of another model; "
                "record both with the same model, prompts and sampling options"
            )
        if path.stem in found or path.stem == _PLAIN:
            raise RequestError(f"{path}: the name {path.stem} is taken already; give every recording its own name")
        found[path.stem] = recording
    return found


def _texts(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    return [(text.id, text.token_ids) for text in recording.texts]


def replayed(recording: Recording, costs: Costs, n_max: int) -> Replayed:
    """Replay every text with the limit of drafting forwards before a step that makes the texts fastest in all.

    Drafters that make forwards may make at least one: without any it would be another way to draft.
    """
    rows = [row for text in recording.texts for row in text.proposals]
    most = max((len(row.evaluated) for row in rows), default=0)
    found = [_replayed(recording, costs, n_max, n) for n in range(min(1, most), min(most, n_max) + 1)]
    return max(found, key=lambda one: float(one.total["tok_s"]))


def _replayed(recording: Recording, costs: Costs, n_max: int, n_forwards: int) -> Replayed:
    tasks: dict[str, list[Replay]] = {}
    for text in recording.texts:
        one = replay(text.token_ids, text.proposals, costs.seconds, n_max, costs.price, n_forwards, costs.resume_s)
        tasks.setdefault(text.task, []).append(one)
    return Replayed(tasks, n_forwards)


def read_costs(curve: str, recording: Recording) -> Costs:
    """Return the times of a modelled device, or those in a file of edgedec bench --curve-out.

    Such a file has no times of a draft model: they are taken to be the target's, scaled by the models' bytes.

    Raises:
        RequestError: The name is neither a device nor such a file.
        StorageError: The file can't be read.
    """
    size = recording.size
    drafts = recording.draft_model or size
    if curve in DEVICES:
        device = DEVICES[curve]
        seconds = modelled(device, size.n_bytes, size.n_params)
        draft_model = modelled(device, drafts.n_bytes, drafts.n_params)
        source = f"{curve}, MODELLED from a roofline ({device.basis})"
        return Costs(seconds, draft_model, source, device.launch_s)
    measured = _read_curve(curve)
    by_bytes = drafts.n_bytes / size.n_bytes
    source = f"measured, {Path(curve).name}"
    if recording.draft_model is not None:
        source += "; the draft model's times are scaled by its bytes"

    def seconds_of(n: int) -> float:
        return measured.seconds(n) or float(n)

    return Costs(seconds_of, lambda n: by_bytes * seconds_of(n), source)


def _read_curve(name: str) -> CostCurve:
    path = Path(name)
    if not path.exists():
        raise RequestError(f"--curve {name!r} is neither a file nor a device; the devices are: {', '.join(DEVICES)}")
    text = read_text(path)
    try:
        points = {int(n): float(seconds) for n, seconds in json.loads(text)["curve"].items()}
        if not points or not all(n >= 1 and 0 < seconds < 1e9 for n, seconds in points.items()):
            raise ValueError("no point, or a number of tokens or a time that is out of range")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path} is not a cost curve; make one with edgedec bench --curve-out") from error
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
    notes = [f"at most {counted(n, 'forward')} of drafting before a step"] if n else []
    return [*columns([_HEADINGS, *rows]), *notes]


def _compared(document: Mapping[str, Any]) -> list[str]:
    """Return the table of ways to draft, the fastest way, and the tasks for which another way is the fastest."""
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


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, and replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", metavar="ROWS", type=Path, nargs="+", help="files of edgedec bench --rows")
    parser.add_argument("--curve", help="a file of edgedec bench --curve-out, or a modelled device (default: all)")
    parser.add_argument("--draft-max", type=int, default=N_DRAFT_MAX, help="most tokens of a draft")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="what each forward waits for another machine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        simulate(args.rows, args.curve, n_max=args.draft_max, delay_s=args.delay_ms / 1000, as_json=args.json)
    except EdgedecError as error:
        sys.exit(f"simulate.py: {error}")


if __name__ == "__main__":
    main()
