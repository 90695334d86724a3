"""Compare relatives of EAGLE-3 heads on the lessons of one, all trained on as many tokens.

    python benchmarks/studies/relatives.py train MODEL --lessons FOLDER --work WORK --tokens 30000,63000
    python benchmarks/studies/relatives.py report MODEL --lessons FOLDER --work WORK --json-out FILE

FOLDER is the `lessons` of a training (`edgedec train-drafter`). `train` takes each method to the first number of
tokens, then each to the second, from the beginning, as the learning rate falls over the whole training. All methods
learn from the same lessons in the same order, and are measured on the same lessons held back; all but rows in the
target's layers draft the tokens of one short list. Whatever stops `train`, it goes on when the same command runs
again, from the last checkpoint, at most a minute old. Torch uses one thread.

`report` prints a table: tokens a step with the longest chains, what a draft reads once a round and for each token, and
the speed that this machine's measured cost curve makes of it, or an earlier table's (--curve). Drafts of a head or a
draft model cost their share of the bytes that a plain step reads; rows in the target's layers cost rows of its forward.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, strftime

import numpy as np
import torch
from relatives_methods import METHODS, Given
from relatives_report import MeasuredCurve, report

from edgedec.gguf.file import read_gguf
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.storage.cache_files import cache_folder
from edgedec_export.training import checkpoints
from edgedec_export.training.batches import LessonPlace, endless_groups
from edgedec_export.training.checkpoints import Progressed
from edgedec_export.training.lessons.lesson_files import first_files, lesson_files
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts

DRAFTED, CHECKPOINT = "drafted.npz", "checkpoint.pt"
_ROWS = 2048  # of a batch, as in `edgedec train-drafter`
_SAVE_EVERY_S = 60.0


def train(name: str, given: Given, work: Path, n_tokens: int, seconds: float) -> bool:
    """Train a method, or go on with it; return whether it is trained and measured.

    Args:
        name: One of METHODS.
        given: What it learns from.
        work: Where its checkpoint is, and at the end what it drafts on the lessons held back.
        n_tokens: Tokens to learn from.
        seconds: It stops after so many; a checkpoint is written.
    """
    if (work / DRAFTED).exists():
        return True
    begin = saved_at = monotonic()
    key = json.dumps([name, n_tokens, given.n_vocabulary, len(given.files), *map(str, given.parts.gguf.paths)])
    work.mkdir(parents=True, exist_ok=True)
    method = METHODS[name].new(given)
    state = checkpoints.restore(work / CHECKPOINT, key)
    if state is None:
        state = Progressed(given.borrowed.token_ids, LessonPlace(), 0, [])
    if state.learner is not None:
        method.restore(state.learner)
    groups = endless_groups(given.to_learn, _ROWS, 0, state.place)
    while state.n_seen < n_tokens:
        place, lessons = next(groups)
        loss = method.learn(lessons, state.n_seen / n_tokens)
        state.place, state.n_seen = place, state.n_seen + sum(lesson.n_answer for lesson in lessons)
        if monotonic() - saved_at > _SAVE_EVERY_S:
            state.learner, saved_at = method.state(), monotonic()
            checkpoints.save(work / CHECKPOINT, key, state)
            _say(f"{name}: {state.n_seen} of {n_tokens} tokens, loss {loss:.3f}")
        if state.n_seen < n_tokens and monotonic() - begin > seconds:
            state.learner = method.state()
            checkpoints.save(work / CHECKPOINT, key, state)
            return False
    _keep(work / DRAFTED, method.drafted(method.weights, given.held_back()), state.n_seen, _n_trained(method.weights))
    (work / CHECKPOINT).unlink(missing_ok=True)
    _say(f"{name}: learned from {state.n_seen} tokens in {monotonic() - begin:.0f} s since it was started")
    return True


def _n_trained(weights: dict[str, torch.Tensor]) -> int:
    return sum(values.numel() for values in weights.values() if values.requires_grad)


def _say(line: str) -> None:
    print(strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def _keep(path: Path, drafted: Sequence[Drafted], n_seen: int, n_trained: int) -> None:
    """Write what a method drafts to a file, whole or not at all."""
    part = path.with_suffix(".part.npz")
    np.savez(
        part,
        kind=np.array([text.kind for text in drafted]),
        n=np.array([len(text.right) for text in drafted]),
        right=np.concatenate([text.right for text in drafted]),
        sure=np.concatenate([text.sure for text in drafted]),
        n_seen=n_seen,
        n_trained=n_trained,
    )
    part.replace(path)


def main() -> int:
    """Train methods, or print the report; return 1 where a training stopped before its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training, reporting = (commands.add_parser(name) for name in ("train", "report"))
    for command in (training, reporting):
        command.add_argument("model", help="the target: a path or a name")
        command.add_argument("--lessons", required=True, type=Path, help="the folder of lessons")
        command.add_argument(
            "--collected", type=int, help="take the first files that hold so many tokens; default: all"
        )
        command.add_argument("--vocabulary", type=int, default=3072, help="tokens of the short list (default: 3072)")
        command.add_argument("--work", required=True, type=Path, help="where checkpoints and results are kept")
    training.add_argument("--methods", default=",".join(METHODS), help="which, with commas between (default: all)")
    training.add_argument("--tokens", default="63000", help="tokens to learn from, numbers with commas between")
    training.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many (default: never)")
    reporting.add_argument("--head", type=Path, help="the folder of a finished EAGLE-3 head, for a row of its own")
    reporting.add_argument("--json-out", type=Path, help="write the table there as JSON")
    reporting.add_argument("--curve", type=Path, help="a table whose cost curve is taken; default: this machine's")
    reporting.add_argument("--cache-dir", type=Path, help="where measurements are kept; an empty one measures anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = resolve(options.model, ResolveOptions(cache_folder(), offline=True))
    if options.collected is None:
        files = list(lesson_files(options.lessons).values())
    else:
        files = first_files(options.lessons, options.collected)
    if not files:
        parser.error(f"{options.lessons}: it holds too few lessons; collect more with edgedec train-drafter")
    given = Given(TargetParts.of(read_gguf(model)), files, options.vocabulary)
    if options.command == "train":
        end = monotonic() + options.seconds
        return (
            0
            if all(
                train(name, given, options.work / str(n_tokens) / name, n_tokens, end - monotonic())
                for n_tokens in map(int, options.tokens.split(","))
                for name in options.methods.split(",")
            )
            else 1
        )
    if options.curve is None:
        measured = MeasuredCurve.here(model, options.cache_dir)
    else:
        measured = MeasuredCurve.of_table(options.curve)
    found = report(given, options.work, options.head, measured)
    if options.json_out is not None:
        options.json_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
