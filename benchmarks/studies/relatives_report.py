"""The table of the comparison of EAGLE-3's relatives: a row for each method and length of training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from relatives_costs import Price
from relatives_methods import METHODS, Given, eagle3_price
from torch.nn.functional import linear

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.load_options import LoadOptions
from edgedec.sessions.cost_probe import cost_curve
from edgedec_apps.bench.provenance import provenance
from edgedec_export.training.head_student import HeadStudent
from edgedec_export.training.kinds import bytes_per_step
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import TAP_SCALE
from edgedec_export.training.rows.llama import TorchLlama
from edgedec_export.training.simulation import Drafted, reach, replay
from edgedec_runtimes.trained_heads.load import load_head

_CHECKED = 8  # lessons on which the target in torch is compared


@dataclass(frozen=True, slots=True)
class Kept:
    """What a trained method left.

    Attributes:
        drafted: What it drafts on the lessons held back.
        n_seen: Tokens that it learned from.
        n_trained: Its trained parameters.
    """

    drafted: list[Drafted]
    n_seen: int
    n_trained: int

    @classmethod
    def read(cls, path: Path) -> "Kept":
        """Return what `relatives.py train` wrote to a file."""
        with np.load(path) as arrays:
            ends = np.cumsum(arrays["n"])[:-1]
            parts = zip(arrays["kind"], np.split(arrays["right"], ends), np.split(arrays["sure"], ends), strict=True)
            drafted = [Drafted(str(kind), right, sure) for kind, right, sure in parts]
            return cls(drafted, int(arrays["n_seen"]), int(arrays["n_trained"]))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        name: The method.
        n_seen: Tokens that it learned from.
        n_trained: Its trained parameters.
        round_bytes: Bytes that a draft reads once, at its best speed.
        token_bytes: Bytes that it reads for a token, in the mean of the longest draft; 0 for rows of the target.
        n_rows: Rows of a mean step at its best speed.
        tokens_per_step: By kind of prompt, and "all", with the longest and surest chains.
        reach: The chance that such a draft is accepted up to its first, second, ... token.
        speed: How many times as fast as plain decoding, the best way to draft simulated.
        gained: Tokens a step in this way.
        way: The way in words.
    """

    name: str
    n_seen: int
    n_trained: int
    round_bytes: int
    token_bytes: int
    n_rows: float
    tokens_per_step: dict[str, float]
    reach: tuple[float, ...]
    speed: float
    gained: float
    way: str

    @classmethod
    def of(cls, name: str, kept: Kept, price: Price, curve: CostCurve) -> "Row":
        """Return the row of a method."""
        chains = price.chains(kept.drafted)
        n_most, kinds = chains[0].right.shape[1], sorted({text.kind for text in chains})
        groups = {kind: [text for text in chains if text.kind == kind] for kind in kinds} | {"all": chains}
        gained = {kind: replay(texts, lambda n: 1.0, n_most).tokens_per_step for kind, texts in groups.items()}
        best = price.best(kept.drafted, curve)
        return cls(
            name,
            kept.n_seen,
            kept.n_trained,
            round(best.bytes.round),
            round(best.bytes.token),
            best.n_rows,
            gained,
            reach(chains, n_most),
            best.outcome.speed,
            best.outcome.tokens_per_step,
            best.way,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON types."""
        return {
            "method": self.name,
            "tokens_learned": self.n_seen,
            "trained_parameters": self.n_trained,
            "bytes_a_round": self.round_bytes,
            "bytes_a_drafted_token": self.token_bytes,
            "rows_a_step": round(self.n_rows, 3),
            "tokens_a_step": {kind: round(value, 4) for kind, value in self.tokens_per_step.items()},
            "reach": [round(chance, 4) for chance in self.reach],
            "expected_speed": round(self.speed, 4),
            "tokens_a_step_at_that_speed": round(self.gained, 4),
            "way": self.way,
        }


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """The cost of the target's forwards.

    Attributes:
        curve: Their seconds by their rows.
        where: What names the machine and the code that it was measured with.
    """

    curve: CostCurve
    where: dict[str, Any]

    @classmethod
    def of_table(cls, path: Path) -> "MeasuredCurve":
        """Return the curve of an earlier table."""
        table = json.loads(path.read_text(encoding="utf-8"))
        curve = CostCurve({int(n): seconds for n, seconds in table["curve_s"].items()})
        return cls(curve, table.get("curve_measured", {key: table[key] for key in ("commit", "cpu")}))

    @classmethod
    def here(cls, model: Path, cache: Path | None) -> "MeasuredCurve":
        """Return this machine's; measured, where the cache holds none."""
        with edgedec.load(model, runtime="cpu", draft="off", cache_dir=cache, offline=True) as engine:
            session = engine.session()
            try:
                curve = cost_curve(session, LoadOptions(cache_dir=cache))
            finally:
                session.close()
        return cls(curve, {key: provenance()[key] for key in ("commit", "cpu")})


def report(given: Given, work: Path, head: Path | None, measured: MeasuredCurve) -> dict[str, Any]:
    """Print the table of all that is trained in `work`, and return it as plain JSON types.

    Args:
        given: What the methods were given.
        work: The folder of `relatives.py train`.
        head: A finished EAGLE-3 head, for a row of its own; None for none.
        measured: The cost of the target's forwards.
    """
    rows, curve = [], measured.curve
    paths = sorted(work.glob("*/*/drafted.npz"), key=lambda path: (int(path.parts[-3]), path.parts[-2]))
    for path in paths:
        name = path.parent.name
        rows.append(Row.of(name, Kept.read(path), METHODS[name].price(given), curve))
    if head is not None:
        rows.append(_finished(head, given, curve))
    print_table(rows)
    held = given.held_back()
    same = agreement(TorchLlama.of(given.parts), held[:_CHECKED])
    print(f"the target in torch: the lessons' most probable token at {same:.3f} of the places")
    return {
        "model": given.parts.gguf.paths[0].name,
        "tokens_measured_on": sum(lesson.n_answer - 1 for lesson in held),
        "vocabulary": given.n_vocabulary,
        "curve_s": {str(n): seconds for n, seconds in curve.table().items()},
        "curve_measured": measured.where,
        "step_bytes": bytes_per_step(given.parts),
        "torch_agreement": round(same, 4),
        "rows": [row.as_json() for row in rows],
        **provenance(),
    }


def agreement(llama: TorchLlama, lessons: Sequence[Lesson]) -> float:
    """Return the share of the answers' places where this model's most probable token is the one in the lessons."""
    n_same = n_all = 0
    norm = torch.from_numpy(llama.parts.output_norm)
    matrix = torch.from_numpy(llama.parts.output_rows(np.arange(llama.parts.network.n_vocab)))
    for lesson in lessons:
        x, _ = llama.read(torch.from_numpy(llama.parts.embeddings(lesson.token_ids[:-1])))
        best = linear(llama.norm(x[lesson.n_prompt - 1 :], norm), matrix).argmax(-1).numpy()
        n_same, n_all = n_same + int((best == lesson.best).sum()), n_all + lesson.n_answer
    return n_same / n_all


def _finished(path: Path, given: Given, curve: CostCurve) -> Row:
    """Return the row of the EAGLE-3 head in a folder that `edgedec train-drafter` wrote."""
    head, record = load_head(path), json.loads((path / "edgedec-head.json").read_text(encoding="utf-8"))
    weights = {name: torch.from_numpy(tensor.floats()) for name, tensor in head.tensors.items()}
    weights[TAP_SCALE] = torch.ones(len(head.card.taps) * head.card.n_embd_target)
    student = HeadStudent(given.parts, head.card, head.d2t, given.first_lessons(), seed=0, device="cpu")
    n_trained = sum(values.numel() for name, values in weights.items() if name != TAP_SCALE)
    kept = Kept(student.drafted(weights, given.held_back()), record["about"]["history"][-1][0], n_trained)
    return Row.of("eagle3, finished", kept, eagle3_price(given, head.card), curve)


def print_table(rows: Sequence[Row]) -> None:
    """Print rows as a Markdown table."""
    kinds = [kind for kind in rows[0].tokens_per_step if kind != "all"]
    heads = ["method", "learned from", "parameters", "MB a round", "MB a token", "rows a step", "all", *kinds]
    print("| " + " | ".join([*heads, "reach 1, 2, 3", "speed", "way"]) + " |\n|" + "---|" * (len(heads) + 3))
    for row in rows:
        cells = [row.name, f"{row.n_seen:,}", f"{row.n_trained:,}"]
        cells += [f"{row.round_bytes / 1e6:.1f}", f"{row.token_bytes / 1e6:.1f}", f"{row.n_rows:.1f}"]
        cells += [f"{row.tokens_per_step[kind]:.3f}" for kind in ("all", *kinds)]
        cells += [", ".join(f"{chance:.2f}" for chance in row.reach[:3]), f"{row.speed:.3f}", row.way]
        print("| " + " | ".join(cells) + " |")
