"""Measures an export against its source, in a process of its own: `python -m edgedec_apps.evaluation.export_measure`.

The process prints one JSON object; its memory, and a crash of a library in it, do not affect the caller.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken
from edgedec.storage.cache_files import cache_folder
from edgedec.tokenizer import added_around
from edgedec_apps.bench.provenance import versions
from edgedec_apps.evaluation.evaluate import DEFAULT_TEXT, N_ROWS, cut_windows, evaluate
from edgedec_apps.evaluation.settings import RunSetting, open_lanes
from edgedec_export.report import forward_times
from edgedec_runtimes.shared.cpu_count import usable_cores

N_TOKENS = 1024
"""Tokens of the text that are evaluated."""

_WINDOW = 512
_POLL_S = 0.2


def measure(source: Path, folder: Path, cancel: CancelToken) -> dict[str, Any]:
    """Return the quality and the times of an export, measured in this process.

    Raises:
        CancelledError: The measurement was cancelled.
        EdgedecError: As loading and evaluating the two models.
    """
    with ExitStack() as stack:
        options = LoadOptions(max_rows=N_ROWS, cache_dir=cache_folder(), cancel=cancel)
        settings = [RunSetting(path.name, path, name) for path, name in ((source, "cpu"), (folder, "onnx"))]
        lanes, model = open_lanes(settings, options, _WINDOW, stack)
        text = DEFAULT_TEXT.read_text(encoding="utf-8")
        token_ids = model.tokenizer.encode(text, add_special=False)[:N_TOKENS]
        reading = evaluate(lanes, cut_windows(token_ids, added_around(model.tokenizer)[0], _WINDOW), cancel)
        cancel.check("measuring the export")
        baseline, figures = reading.figures
        times = forward_times([lane.session.model for lane in lanes], cancel)
        quality = {name: getattr(figures, name) for name in ("kl_mean", "kl_p99", "top1", "n_positions", "ppl")}
        return {
            "quality": quality | {"ppl_source": baseline.ppl},
            "seconds": {str(n): {"source": times[0][n], "export": times[1][n]} for n in times[0]},
            "threads": usable_cores(),
            "versions": versions() | {"onnxruntime": metadata.version("onnxruntime")},
        }


def measured_apart(source: Path, folder: Path, cancel: CancelToken) -> dict[str, Any]:
    """Return the result of `measure`, from a process of its own; a frozen application measures in this process.

    Raises:
        RuntimeUnavailableError: The measurement failed; the message has the last line of the process.
        CancelledError: The measurement was cancelled; the process is ended.
    """
    if getattr(sys, "frozen", False):
        return measure(source, folder, cancel)
    command = [
        sys.executable,
        "-m",
        "edgedec_apps.evaluation.export_measure",
        str(source.absolute()),
        str(folder.absolute()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                out, err = process.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if cancel.cancelled:
                    process.kill()
        cancel.check("measuring the export")
        if process.returncode:
            last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise RuntimeUnavailableError(f"the export is complete, but could not be measured: {last}")
        document: dict[str, Any] = json.loads(out.splitlines()[-1])
        return document


def main() -> None:
    """Measure an export; the command line has the paths of its source and its folder."""
    source, folder = map(Path, sys.argv[1:3])
    print(json.dumps(measure(source, folder, CancelToken())))


if __name__ == "__main__":
    main()
