"""edgedec simulate: recorded drafts under another device's cost curve."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.curve import CostCurve
from edgedec.errors import RequestError, StorageError
from edgedec.recording import Replay, replay
from edgedec_apps.bench_rows import Recording, read_recording
from edgedec_apps.bench_table import columns
from edgedec_apps.cli.terminal import write_json, write_line
from edgedec_apps.rooflines import DEVICES, modelled

_HEADINGS = ("task", "tok/s", "plain", "speedup", "accepted/step")


@dataclass(frozen=True, slots=True)
class Costs:
    """T(n) in seconds, and where it comes from."""

    seconds: Callable[[int], float]
    source: str


def simulate(rows: Path, curve: str | None, *, n_max: int, as_json: bool) -> None:
    """Replay the drafts and print the expected speed per task, or on every modelled device."""
    if n_max < 1:
        raise RequestError(f"--draft-max is {n_max}; it must be at least 1")
    recording = read_recording(rows)
    found = [_document(recording, read_costs(name, recording), n_max) for name in ([curve] if curve else DEVICES)]
    if as_json:
        write_json(found[0] if curve else found)
        return
    write_line(f"{recording.model} · drafting time left out")
    for document in found:
        write_line("")
        write_line(document["curve"])
        tasks = document["tasks"].items() if curve else ()
        for line in columns([_HEADINGS, *(_row(task, one) for task, one in tasks), _row("all", document["all"])]):
            write_line(line)


def _document(recording: Recording, costs: Costs, n_max: int) -> dict[str, Any]:
    tasks: dict[str, list[Replay]] = {}
    for text in recording.texts:
        tasks.setdefault(text.task, []).append(replay(text.token_ids, text.proposals, costs.seconds, n_max))
    return {
        "model": recording.model,
        "curve": costs.source,
        "all": _figures([one for replays in tasks.values() for one in replays]),
        "tasks": {task: _figures(replays) for task, replays in tasks.items()},
    }


def read_costs(curve: str, recording: Recording) -> Costs:
    """Return the curve of a modelled device, or the one in a file that edgedec bench --curve-out wrote.

    Raises:
        RequestError: It is neither.
        StorageError: The file can't be read.
    """
    if curve in DEVICES:
        device = DEVICES[curve]
        seconds = modelled(device, recording.n_bytes, recording.n_params)
        return Costs(seconds, f"{curve}, MODELLED from a roofline ({device.basis})")
    path = Path(curve)
    if not path.exists():
        raise RequestError(f"--curve {curve!r} is no file and no device; modelled devices: {', '.join(DEVICES)}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        points = {int(n): float(seconds) for n, seconds in found["curve"].items()}
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path} is no curve; edgedec bench --curve-out writes one") from error
    if not points or not all(n >= 1 and 0 < seconds < 1e9 for n, seconds in points.items()):
        raise RequestError(f"{path} is no curve; edgedec bench --curve-out writes one")
    measured = CostCurve(points)
    return Costs(lambda n: measured.seconds(n) or float(n), f"measured, {path.name}")


def _figures(replays: list[Replay]) -> dict[str, Any]:
    n_tokens, n_steps = sum(found.n_tokens for found in replays), sum(found.n_steps for found in replays)
    seconds, plain_s = sum(found.seconds for found in replays), sum(found.plain_s for found in replays)
    return {
        "tok_s": n_tokens / seconds if seconds else 0.0,
        "plain_tok_s": n_tokens / plain_s if plain_s else 0.0,
        "speedup": plain_s / seconds if seconds else 1.0,
        "accepted_per_step": n_tokens / n_steps - 1 if n_steps else 0.0,
    }


def _row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{found['tok_s']:.1f}",
        f"{found['plain_tok_s']:.1f}",
        f"{found['speedup']:.2f}",
        f"{found['accepted_per_step']:.2f}",
    )
