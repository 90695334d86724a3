"""Our picture encoder beside libmtmd: one tile through an encoder in true proportions with random weights.

    python benchmarks/forwards/picture_encoder.py --runs 5 --json-out picture_encoder.json

The encoder is SmolVLM-256M's (SigLIP B/16-512: 12 layers of width 768, 1,024 patches, 64 rows), in F16 and in Q8_0; or
gemma 3's with --gemma3. Both encode the same tile in turn, in one process, with the same threads. The rows must agree
first. Times are of one tile: seconds that pass, and seconds of all threads, which say more on a machine with other
work. How far the rows are from float64 is in the tests (tests/runtimes/pictures/test_native_encoder.py).
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.models.siglip_files import siglip_projector

from edgedec_apps.bench.provenance import report
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.mtmd import Mtmd
from edgedec_runtimes.pictures.native_encoder import open_native
from edgedec_runtimes.pictures.opening import opening

_SHAPES: dict[str, dict[str, int]] = {
    "idefics3": {
        "n_embd": 768,
        "n_ff": 3072,
        "n_layer": 12,
        "n_head": 12,
        "image_size": 512,
        "patch_size": 16,
        "merge": 4,
        "n_out": 576,
    },
    "gemma3": {
        "n_embd": 1152,
        "n_ff": 4304,
        "n_layer": 27,
        "n_head": 16,
        "image_size": 896,
        "patch_size": 14,
        "merge": 4,
        "n_out": 2560,
    },
}
_CLOSE = {"F16": 0.01, "Q8_0": 0.1}  # of Q8_0, libmtmd rounds activations to 8 bits
PAUSE = 0.05  # seconds; OpenMP's threads wait actively for some milliseconds after llama.cpp's work


def timed(encode: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and those of all threads."""
    time.sleep(PAUSE)
    wall, cpu = time.perf_counter(), time.process_time()
    encode()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(kind: str, type_name: str, n_threads: int, n_runs: int, folder: Path) -> dict[str, Any]:
    """Return the times of both, alternating, and how far the rows are from each other."""
    shape = _SHAPES[kind]
    path = siglip_projector(folder / f"{kind}-{type_name}.gguf", kind, type_name, **shape)
    header = read_projector(path)
    our_encoder = open_native(path, header, n_threads)
    if our_encoder is None:
        raise SystemExit(f"our encoder does not take the file of {kind} in {type_name}")
    their_encoder = Mtmd(opening(header, "llama", n_threads, None))
    side = shape["image_size"]
    pixels = np.random.default_rng(1).integers(0, 256, side * side * 3, dtype=np.uint8)
    # Of a square picture no larger than a tile, idefics3 makes one tile and an overview of the same pixels.
    picture = Picture(side, side, pixels.tobytes())
    made: dict[str, list[NDArray[np.float32]]] = {}

    def our_way() -> None:
        made["ours"] = our_encoder.encode(picture)

    def their_way() -> None:
        made["theirs"] = their_encoder.encode(picture, lambda done, total: None)[1]

    our_way()
    their_way()
    n_tiles, scale = len(made["ours"]), float(np.sqrt(np.mean(made["theirs"][0] ** 2)))
    far = max(float(np.abs(a - b).max()) / scale for a, b in zip(made["ours"], made["theirs"], strict=True))
    if far > _CLOSE[type_name]:
        raise SystemExit(f"the rows differ by {far:.3g} of their size; expected at most {_CLOSE[type_name]}")
    runs = [(timed(our_way), timed(their_way)) for _ in range(n_runs)]
    result: dict[str, Any] = {
        "kind": kind,
        "type": type_name,
        "n_threads": n_threads,
        "n_tiles": n_tiles,
        "differ": far,
    }
    for i, who in enumerate(("ours", "theirs")):
        for j, what in enumerate(("wall_s", "cpu_s")):
            times = [run[i][j] / n_tiles for run in runs]
            result[f"{who}_{what}"] = round(median(times), 4)
            result[f"{who}_{what}_range"] = [round(min(times), 4), round(max(times), 4)]
    for j, what in enumerate(("wall_s", "cpu_s")):
        result[f"times_faster_{what}"] = round(median(theirs[j] / ours[j] for ours, theirs in runs), 3)
    our_encoder.close()
    their_encoder.close()
    path.unlink()
    return result


def main() -> None:
    """Compare, and print a line for each type; the last line of JSON has all, and where the figures come from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=["F16", "Q8_0"])
    parser.add_argument("--gemma3", action="store_true")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for type_name in args.types:
            kind = "gemma3" if args.gemma3 else "idefics3"
            found = compare(kind, type_name, args.threads, args.runs, Path(folder))
            results.append(found)
            print(json.dumps(found), flush=True)
    report({"benchmark": "picture_encoder", "found": results}, args.json_out)


if __name__ == "__main__":
    main()
