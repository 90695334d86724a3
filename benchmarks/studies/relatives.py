"""Compare relatives of EAGLE-3 heads on the lessons of one: Medusa's heads, Hydra's, and prompt tokens (PPD).

    python benchmarks/studies/relatives.py train METHOD MODEL --head HEAD --lessons FOLDER --work WORK --tokens 63000
    python benchmarks/studies/relatives.py report MODEL --head HEAD --lessons FOLDER --work WORK --json-out FILE

METHOD is medusa, hydra, ppd or eagle3 (arXiv:2401.10774, 2402.05109, 2405.18628, 2503.01840). HEAD is an EAGLE-3 head
of the model, FOLDER the `lessons` of its training (`edgedec train-drafter`). Each method learns from the lessons that
the head learned from, in the same order, and is measured on the same lessons held back; heads draft the tokens that
HEAD drafts. A training that was stopped (Ctrl-C, or --seconds) goes on when the same command runs again; with `measure`
in place of `train` it is measured as it is. Torch uses one thread.

`report` prints one table: greedy chains of at most six tokens (of three for PPD), and the speed that this machine's
measured cost curve makes of them. A drafted token of a head costs its share of the bytes that a plain step reads; one
of PPD costs rows of the target's forward.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from relatives_costs import best_prompt_tokens, costs_of, eagle3_bytes, heads_bytes, step_bytes
from relatives_heads import HeadShape
from relatives_methods import METHODS, Given, Method, method_of
from relatives_prompt import N_PROMPT_TOKENS, TorchLlama, agreement

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.sessions.cost_probe import cost_curve
from edgedec_apps.bench.provenance import provenance
from edgedec_export.training import checkpoints
from edgedec_export.training.batches import LessonPlace, endless_groups
from edgedec_export.training.checkpoints import Progressed
from edgedec_export.training.foresight import drafted_on
from edgedec_export.training.lessons.lesson_files import lesson_files
from edgedec_export.training.network import TAP_SCALE, Weights
from edgedec_export.training.simulation import Drafted, best_outcome, reach, replay
from edgedec_export.training.target_parts import TargetParts
from edgedec_models.folders import cache_folder
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.load import load_head

DRAFTED, CHECKPOINT = "drafted.npz", "checkpoint.pt"
_ROWS = 2048  # of a batch, as in `edgedec train-drafter`
_SAVE_EVERY_S = 60.0
_CHECKED = 8  # lessons on which the target in torch is compared


def train(name: str, given: Given, work: Path, n_tokens: int, seconds: float) -> bool:
    """Train a method, or go on with it; return whether it is trained and measured.

    Args:
        name: One of METHODS.
        given: What it learns from.
        work: Where its checkpoint is, and at the end what it drafts on the lessons held back.
        n_tokens: Tokens to learn from.
        seconds: It stops after so many; a checkpoint is written.
    """
    begin, key = monotonic(), _key(name, given, n_tokens)
    work.mkdir(parents=True, exist_ok=True)
    method, state = _restored(name, given, work, key)
    groups = endless_groups(given.to_learn, 1 if name == "ppd" else _ROWS, 0, state.place)
    saved_at = monotonic()
    try:
        while state.n_seen < n_tokens:
            place, lessons = next(groups)
            learned = method.learn(lessons, state.n_seen / n_tokens)
            state.place, state.n_seen = place, state.n_seen + learned
            print(f"\r{name}: {state.n_seen} of {n_tokens} tokens", end="", file=sys.stderr, flush=True)
            if monotonic() - begin > seconds:
                break
            if monotonic() - saved_at > _SAVE_EVERY_S:
                state.learner, saved_at = method.state(), monotonic()
                checkpoints.save(work / CHECKPOINT, key, state)
    finally:
        state.learner = method.state()
        checkpoints.save(work / CHECKPOINT, key, state)
    if state.n_seen < n_tokens:
        return False
    if not (work / DRAFTED).exists() or kept(work / DRAFTED)[1] != state.n_seen:
        _keep(work / DRAFTED, method.drafted(given.held_back()), state.n_seen)
    return True


def measure(name: str, given: Given, work: Path, n_tokens: int) -> int:
    """Measure a method as it is, its training over or not, and return the tokens that it learned from; as train()."""
    method, state = _restored(name, given, work, _key(name, given, n_tokens))
    _keep(work / DRAFTED, method.drafted(given.held_back()), state.n_seen)
    return state.n_seen


def _key(name: str, given: Given, n_tokens: int) -> str:
    return json.dumps([name, n_tokens, *given.parts.gguf.paths], default=str)


def _restored(name: str, given: Given, work: Path, key: str) -> tuple[Method, Progressed]:
    """Return a method and how far it has come; a new one where there is no checkpoint."""
    method = method_of(name, given)
    state = checkpoints.restore(work / CHECKPOINT, key) or Progressed(given.head.d2t, LessonPlace(), 0, [])
    if state.learner is not None:
        method.restore(state.learner)
    return method, state


def _keep(path: Path, drafted: Sequence[Drafted], n_seen: int) -> None:
    """Write what a method drafts to a file."""
    np.savez(
        path,
        kind=np.array([text.kind for text in drafted]),
        n=np.array([len(text.right) for text in drafted]),
        right=np.concatenate([text.right for text in drafted]),
        sure=np.concatenate([text.sure for text in drafted]),
        n_seen=n_seen,
    )


def kept(path: Path) -> tuple[list[Drafted], int]:
    """Return what _keep wrote: the drafts, and the tokens that the method learned from."""
    with np.load(path) as arrays:
        ends = np.cumsum(arrays["n"])[:-1]
        parts = zip(arrays["kind"], np.split(arrays["right"], ends), np.split(arrays["sure"], ends), strict=True)
        return [Drafted(str(kind), right, sure) for kind, right, sure in parts], int(arrays["n_seen"])


def head_weights(head: Head) -> Weights:
    """Return a finished EAGLE-3 head as torch's tensors."""
    weights = {name: torch.from_numpy(tensor.floats()) for name, tensor in head.tensors.items()}
    return weights | {TAP_SCALE: torch.ones(len(head.card.taps) * head.card.n_embd_target)}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        name: The method.
        n_seen: Tokens that it learned from.
        n_trained: Its trained parameters.
        n_bytes: Bytes that a drafted token reads, in the mean of a whole draft; 0 for PPD.
        n_rows: Rows of a mean step at its best speed, drafts included.
        tokens_per_step: By kind of prompt, and "all".
        reach: The chance that a draft is accepted up to its first, second, ... token.
        speed: How many times as fast as plain decoding, the best way to draft simulated.
        way: That way in words.
    """

    name: str
    n_seen: int
    n_trained: int
    n_bytes: int
    n_rows: float
    tokens_per_step: dict[str, float]
    reach: tuple[float, ...]
    speed: float
    way: str

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON types."""
        return {
            "method": self.name,
            "tokens_learned": self.n_seen,
            "trained_parameters": self.n_trained,
            "bytes_a_drafted_token": self.n_bytes,
            "rows_a_step": round(self.n_rows, 3),
            "tokens_a_step": {kind: round(value, 4) for kind, value in self.tokens_per_step.items()},
            "reach": [round(chance, 4) for chance in self.reach],
            "expected_speed": round(self.speed, 4),
            "way": self.way,
        }


def row_of(name: str, n_seen: int, drafted: list[Drafted], given: Given, curve: CostCurve) -> Row:
    """Return a method's row of the table; `name` begins with one of METHODS."""
    parts, card = given.parts, given.head.card
    n_most = drafted[0].right.shape[1]
    kinds = sorted({text.kind for text in drafted})
    groups = {kind: [text for text in drafted if text.kind == kind] for kind in kinds} | {"all": drafted}
    gained = {kind: replay(texts, lambda n: 1.0, n_most).tokens_per_step for kind, texts in groups.items()}
    reached = reach(drafted, n_most)
    if name.startswith("ppd"):
        seconds = curve.up_to((N_PROMPT_TOKENS + 1) ** 2)
        best, n_rows, placed = best_prompt_tokens(drafted, seconds)
        n_trained = N_PROMPT_TOKENS * parts.network.n_embd
        way = f"prompt tokens {placed}, probability {best.least_sure}"
        return Row(name, n_seen, n_trained, 0, n_rows, gained, reached, best.speed, way)
    if name.startswith("eagle3"):
        draft_bytes = eagle3_bytes(card, parts)
        n_trained = sum(int(np.prod(tensor.shape)) for tensor in given.head.tensors.values())
    else:
        shape = HeadShape(parts.network.n_embd, name.startswith("hydra"))
        draft_bytes = heads_bytes(shape, len(given.head.d2t), parts)
        n_trained = sum(shape.n_weights(k) + shape.n_embd for k in range(shape.n_heads))
    best = best_outcome(drafted, costs_of(curve, draft_bytes, step_bytes(parts), n_most))
    way = f"up to {best.n_most} tokens, probability {best.least_sure}"
    n_bytes = round(draft_bytes(n_most) / n_most)
    return Row(name, n_seen, n_trained, n_bytes, 1 + best.drafted_per_step, gained, reached, best.speed, way)


def report(model: Path, given: Given, work: Path, head_tokens: int, cache: Path | None) -> dict[str, Any]:
    """Print the table of the head and of every method trained in `work`, and return it as plain JSON types."""
    held = given.held_back()
    curve = measured_curve(model, cache)
    found = drafted_on(given.head.card, head_weights(given.head), given.borrowed(), held)
    rows = [row_of("eagle3, as given", head_tokens, found, given, curve)]
    for path in sorted(work.glob(f"*/{DRAFTED}")):
        drafted, n_seen = kept(path)
        rows.append(row_of(path.parent.name, n_seen, drafted, given, curve))
    print_table(rows)
    same = agreement(TorchLlama.of(given.parts), held[:_CHECKED])
    print(f"the target in torch: the lessons' most probable token at {same:.3f} of the places")
    return {
        "model": model.name,
        "tokens_measured_on": sum(lesson.n_answer - 1 for lesson in held),
        "curve_s": {str(n): seconds for n, seconds in curve.table().items()},
        "step_bytes": step_bytes(given.parts),
        "torch_agreement": round(same, 4),
        "rows": [row.as_json() for row in rows],
        **provenance(),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Print rows as a Markdown table."""
    kinds = [kind for kind in rows[0].tokens_per_step if kind != "all"]
    heads = ["method", "learned from", "parameters", "bytes a token", "rows a step", "all", *kinds, "reach 1, 2, 3"]
    print("| " + " | ".join([*heads, "speed"]) + " |\n|" + "---|" * (len(heads) + 1))
    for row in rows:
        cells = [row.name, f"{row.n_seen:,}", f"{row.n_trained:,}", f"{row.n_bytes:,}", f"{row.n_rows:.1f}"]
        cells += [f"{row.tokens_per_step[kind]:.2f}" for kind in ("all", *kinds)]
        cells += [", ".join(f"{chance:.2f}" for chance in row.reach[:3]), f"{row.speed:.2f}"]
        print("| " + " | ".join(cells) + " |")


def measured_curve(model: Path, cache: Path | None) -> CostCurve:
    """Return the cost curve of the target on this machine; measured, where the cache holds none."""
    with edgedec.load(model, runtime="cpu", draft="off", cache_dir=cache, offline=True) as engine:
        session = engine.session()
        try:
            return cost_curve(session, LoadOptions(cache_dir=cache))
        finally:
            session.close()


def main() -> int:
    """Train a method, or print the report; return 1 where a training stopped before its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training, measuring, reporting = (commands.add_parser(name) for name in ("train", "measure", "report"))
    for command in (training, measuring):
        command.add_argument("method", choices=METHODS)
    for command in (training, measuring, reporting):
        command.add_argument("model", help="the target: a path or a name")
        command.add_argument("--head", required=True, help="an EAGLE-3 head of the target")
        command.add_argument("--lessons", required=True, type=Path, help="the folder of lessons")
        command.add_argument("--work", required=True, type=Path, help="where checkpoints are kept")
    for command in (training, measuring):
        command.add_argument("--tokens", type=int, default=63_000, help="tokens to learn from (default: 63000)")
        command.add_argument("--name", help="the folder in --work and the row in the table (default: the method)")
    training.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many (default: never)")
    reporting.add_argument("--json-out", type=Path, help="write the table there as JSON")
    reporting.add_argument("--cache-dir", type=Path, help="where measurements are kept; an empty one measures anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = resolve(options.model, ResolveOptions(cache_folder(), offline=True))
    parts, head = TargetParts.of(read_gguf(model)), load_head(options.head)
    if head.card.own_output or head.card.own_embedding:
        parser.error(
            f"{options.head}: this head has an embedding or output matrix of its own; take one that borrows both"
        )
    given = Given(parts, head, list(lesson_files(options.lessons).values()))
    if options.command != "report":
        work = options.work / (options.name or options.method)
        if options.command == "measure":
            print(measure(options.method, given, work, options.tokens), "tokens learned from")
            return 0
        return 0 if train(options.method, given, work, options.tokens, options.seconds) else 1
    record = json.loads((Path(options.head) / "edgedec-head.json").read_text(encoding="utf-8"))
    found = report(model, given, options.work, record["about"]["history"][-1][0], options.cache_dir)
    if options.json_out is not None:
        options.json_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
