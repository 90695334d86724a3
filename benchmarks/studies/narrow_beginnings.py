"""Compare how a narrow draft model may begin: what it drafts before it learns, with its output fitted to some answers.

    python benchmarks/studies/narrow_beginnings.py MODEL NAME.training 288:0,1,2,3 576:0,10,19,29 288:random4

NAME.training is the folder that `edgedec train-drafter` keeps. A beginning is a width, and layers of the target or a
number of random ones. The output is fitted by least squares to the first 8 files of answers that are not held back, and
drafts are counted on greedy answers of the first files that are.
"""

import argparse
from pathlib import Path

import numpy as np

from edgedec.gguf.file import read_gguf
from edgedec_export.training.lessons.lesson_files import lesson_files
from edgedec_export.training.narrow.gguf import bytes_per_token
from edgedec_export.training.narrow.initial import initial_weights
from edgedec_export.training.narrow.shape import shape_of
from edgedec_export.training.narrow.student import NarrowStudent
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import reach, replay
from edgedec_export.training.target_parts import TargetParts
from edgedec_export.training.teaching import set_threads


def main() -> None:
    """Print a line for each beginning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the target: a path")
    parser.add_argument("work", type=Path, help="the folder of a training")
    parser.add_argument("beginnings", nargs="+", help="WIDTH:LAYER,LAYER or WIDTH:randomN")
    parser.add_argument("--answers", type=int, default=20, help="answers held back to count on (default: 20)")
    options = parser.parse_args()
    set_threads(1)
    parts = TargetParts.of(read_gguf(options.model))
    files = list(lesson_files(options.work / "lessons").values())
    fitted = [lesson for file in [file for file in files if not file.is_held_back][:8] for lesson in file.read()]
    held = [lesson for file in [file for file in files if file.is_held_back][:5] for lesson in file.read()]
    held = [lesson for lesson in held if lesson.temperature == 0][: options.answers]
    for beginning in options.beginnings:
        width, _, chosen = beginning.partition(":")
        layers = [] if chosen.startswith("random") else [int(layer) for layer in chosen.split(",")]
        n_layer = len(layers) or int(chosen.removeprefix("random"))
        shape = shape_of(parts.network, n_layer, int(width))
        weights = initial_weights(parts, shape, fitted[:16], 0, layers)
        student = NarrowStudent(parts, shape, weights, np.arange(1024, dtype=np.int32), "cpu")
        student.fit_output(fitted)
        drafted = student.drafted(student.weights, held)
        gained = replay(drafted, lambda n: 1.0, MOST_DRAFTED).tokens_per_step
        first = float(np.concatenate([text.right[:, 0] for text in drafted]).mean())
        said = f"tokens a step {gained:.3f}, first token right {first:.3f}, reach 2 {reach(drafted, 2)[1]:.3f}"
        print(f"{beginning}: {said}, {bytes_per_token(shape) / 1e6:.1f} MB a drafted token", flush=True)


if __name__ == "__main__":
    main()
