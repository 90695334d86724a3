"""Compare ways to end a draft head's chains: by its calibrated probability, or by a trained stop as in SpecDec++.

    python benchmarks/studies/chain_stop.py HEAD LESSONS MODEL.gguf --work FOLDER --json-out FILE

HEAD is the folder that `edgedec train-drafter` wrote, LESSONS the folder `lessons` in its work folder. After every
token of the greedy answers that the head did not learn from, it drafts a chain of 6 tokens, as it does while decoding.
Of each drafted token whose predecessors are the text's, these are noted: the head's probability, entropy and margin,
the depth, the head's hidden state, and whether the token is the text's. Rules that say the chance of that from what is
known are fitted on four fifths of the answers and judged on the rest, five times:

- probability: the head's own, as it is
- calibrated: corrected by edgedec.drafter.Calibration, in the order of the text (what edgedec does)
- signs: a logistic function of log-odds, entropy, margin and depth
- linear, network: a stop head on the hidden state (SpecDec++, Huang et al. 2024, arXiv:2405.19715), linear or with a
  layer of 64; network+signs also sees the signs
- known: knows which tokens are right, for the most that a rule could bring

A chain ends before the token with which the product of the chances falls below a threshold; that token was drafted, and
is paid for. Each rule gets its best threshold and length under the cost curve that HEAD's record has. Prints a table;
ends with one line of JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.drafter import Calibration
from edgedec.gguf.file import read_gguf
from edgedec_apps.bench.provenance import report
from edgedec_export.training.batches import batch_of, grouped_by_length
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.lessons.lesson_files import Lesson, lesson_files
from edgedec_export.training.network import TAP_SCALE, Unroll, Weights
from edgedec_export.training.simulation import Drafted, Outcome, replay
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.record import RECORD_FILE

_DEPTH = 6
_FOLDS = 5
_ROWS = 2048  # of a batch
_THRESHOLDS = (0.0, *np.geomspace(0.03, 0.9, 17).round(3).tolist())
_WIDTH, _EPOCHS, _EXAMPLES = 64, 12, 1024  # of a stop head: its inner layer, passes, examples of a batch
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """What a head drafts on one answer; a chain begins after each of n tokens.

    Attributes:
        kind: The kind of prompt.
        fold: Which fifth of the answers it belongs to.
        right: bool[n, 6], whether the drafted token is the text's.
        signs: f32[n, 6, 4], of each drafted token: probability, log-odds, entropy in nats, margin to the second best.
        hidden: f16[n, 6, n_embd], the state that it was drafted from, after the last norm.
    """

    kind: str
    fold: int
    right: NDArray[np.bool_]
    signs: Floats
    hidden: NDArray[np.float16]

    @property
    def reached(self) -> NDArray[np.bool_]:
        """bool[n, 6], whether all tokens before are the text's, so that whether this one is counts."""
        before = np.ones((len(self.right), 1), np.bool_)
        return np.concatenate([before, self.right[:, :-1].cumprod(axis=1).astype(np.bool_)], axis=1)


def held_back(folder: Path) -> list[Lesson]:
    """Return the greedy lessons held back, of prompts that no lesson to learn from has."""
    files = lesson_files(folder).values()
    learned = {found for file in files if not file.is_held_back for found in file.prompt_hashes()}
    lessons = [lesson for file in files if file.is_held_back for lesson in file.read()]
    greedy = [lesson for lesson in lessons if lesson.temperature == 0 and lesson.n_answer > 1]
    return [lesson for lesson in greedy if lesson.prompt_hash not in learned]


def chains_of(
    card: HeadCard, weights: Weights, borrowed: Borrowed, lessons: Sequence[Lesson], folder: Path
) -> list[Chains]:
    """Return the chains that a head drafts on lessons; `folder` keeps them, so that another run goes on from there."""
    folder.mkdir(parents=True, exist_ok=True)
    table = torch.from_numpy(borrowed.parts.embeddings(borrowed.token_ids))
    found: list[Chains] = []
    for number, group in enumerate(grouped_by_length(list(lessons), _ROWS)):
        path = folder / f"chains-{number}.npz"
        if not path.exists():
            with torch.no_grad():
                drafted, signs, states = _drafted(card, weights, borrowed, table, group)
            with path.with_suffix(".partial").open("wb") as file:
                np.savez(file, drafted=drafted, signs=signs, hidden=states)
            path.with_suffix(".partial").replace(path)
        with np.load(path) as arrays:
            found += _by_lesson(group, arrays["drafted"], arrays["signs"], arrays["hidden"])
        print(f"{len(found)} of {len(lessons)} answers", file=sys.stderr)
    return found


def _drafted(
    card: HeadCard, weights: Weights, borrowed: Borrowed, table: Any, lessons: Sequence[Lesson]
) -> tuple[NDArray[np.int32], Floats, NDArray[np.float16]]:
    """Return tokens, signs and states of the chains on lessons, each token read by the next step as while decoding."""
    batch = batch_of(lessons, 1)
    at = torch.from_numpy(batch.at[0])  # the rows after which a chain may begin
    n_batch, n_rows, _ = batch.taps.shape
    unroll = Unroll.begin(card, weights, torch.from_numpy(batch.taps).float())
    read = borrowed.embeddings(batch.read_by(0))
    tokens, signs, hidden = [], [], []
    for _ in range(_DEPTH):
        outputs = unroll.step(read).flatten(0, 1)[at]
        log_p = F.linear(outputs.to(borrowed.rows.dtype), borrowed.rows).float().log_softmax(-1)
        best, places = log_p.topk(2)
        p = best.exp()
        odds = best[:, 0] - torch.log1p(-p[:, 0].clamp(max=1 - 1e-6))
        signs.append(torch.stack([p[:, 0], odds, -(log_p.exp() * log_p).sum(-1), p[:, 0] - p[:, 1]], -1).numpy())
        hidden.append(outputs.half().numpy())
        tokens.append(borrowed.token_ids[places[:, 0].numpy()])
        read = torch.zeros(n_batch * n_rows, card.n_embd)
        read[at] = table[places[:, 0]]
        read = read.view(n_batch, n_rows, -1)
    return np.stack(tokens, axis=1), np.stack(signs, axis=1), np.stack(hidden, axis=1)


def _by_lesson(
    lessons: Sequence[Lesson], drafted: NDArray[np.int32], signs: Floats, states: NDArray[np.float16]
) -> list[Chains]:
    result, begin = [], 0
    for lesson in lessons:
        end = begin + lesson.n_answer - 1
        part = slice(begin, end)
        right = _right(drafted[part], lesson.token_ids[lesson.n_prompt :])
        fold = int(lesson.prompt_hash, 16) % _FOLDS
        result.append(Chains(lesson.kind, fold, right, signs[part], states[part]))
        begin = end
    return result


def _right(drafted: NDArray[np.int32], answer: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return bool[n, 6], whether drafted token k after answer token i is answer token i + 1 + k."""
    padded = np.concatenate([answer, np.full(_DEPTH, -1, answer.dtype)])
    text = np.stack([padded[1 + k : 1 + k + len(drafted)] for k in range(_DEPTH)], axis=1)
    result: NDArray[np.bool_] = drafted == text
    return result


def by_calibration(texts: Sequence[Chains]) -> list[Floats]:
    """Return the head's probabilities, corrected by what was accepted earlier in these texts."""
    calibration, result = Calibration(), []
    for text in texts:
        p, reached = text.signs[..., 0].tolist(), text.reached.tolist()
        values = np.empty(text.right.shape, np.float32)
        for i, (row, known, right) in enumerate(zip(p, reached, text.right.tolist(), strict=True)):
            values[i] = [calibration.corrected(each) for each in row]
            for each, counts, accepted in zip(row, known, right, strict=True):
                if counts:
                    calibration.observe(each, accepted)
        result.append(values)
    return result


def features(text: Chains, names: Sequence[str]) -> Floats:
    """Return f32[n, 6, n_features]: the "signs" with the depth, the "hidden" state, or both."""
    parts = []
    if "signs" in names:
        depth = np.broadcast_to(np.eye(_DEPTH, dtype=np.float32), (len(text.right), _DEPTH, _DEPTH))
        parts += [text.signs[..., 1:], depth]
    if "hidden" in names:
        parts.append(text.hidden.astype(np.float32))
    return np.concatenate(parts, axis=-1)


def by_fit(texts: Sequence[Chains], names: Sequence[str], width: int) -> list[Floats]:
    """Return the chances that networks give which were fitted on the other folds; `width` 0 is a linear function."""
    result: list[Floats] = [np.empty(0, np.float32)] * len(texts)
    for fold in range(_FOLDS):
        learned = [text for text in texts if text.fold != fold]
        x = np.concatenate([features(text, names)[text.reached] for text in learned])
        y = np.concatenate([text.right[text.reached] for text in learned])
        mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-3
        network = _fitted((x - mean) / scale, y, width, fold)
        with torch.no_grad():
            for i, text in enumerate(texts):
                if text.fold == fold:
                    values = torch.from_numpy((features(text, names) - mean) / scale)
                    result[i] = network(values)[..., 0].sigmoid().numpy()
    return result


def _fitted(x: Floats, y: NDArray[np.bool_], width: int, seed: int) -> Any:
    """Return a network of least cross entropy on x, with AdamW, a falling rate and a decay of the weights."""
    torch.manual_seed(seed)
    if width:
        network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], width), torch.nn.SiLU(), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        )
    else:
        network = torch.nn.Linear(x.shape[1], 1)
    inputs, wanted = torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))
    n_steps = _EPOCHS * max(1, len(x) // _EXAMPLES)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3 if width else 1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n_steps)
    for _ in range(n_steps):
        which = torch.randint(len(x), (_EXAMPLES,))
        loss = F.binary_cross_entropy_with_logits(network(inputs[which])[:, 0], wanted[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def rules_of(texts: Sequence[Chains]) -> dict[str, list[Floats]]:
    """Return for each rule f32[n, 6] a text, the chance that each drafted token is right."""
    return {
        "probability": [text.signs[..., 0] for text in texts],
        "calibrated": by_calibration(texts),
        "signs": by_fit(texts, ["signs"], 0),
        "linear": by_fit(texts, ["hidden"], 0),
        "network": by_fit(texts, ["hidden"], _WIDTH),
        "network+signs": by_fit(texts, ["hidden", "signs"], _WIDTH),
        "known": [text.right.astype(np.float32) for text in texts],
    }


def auc(scores: Floats, right: NDArray[np.bool_]) -> float:
    """Return the chance that a right token has a higher score than a wrong one."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    return float((ranks[right].sum() - n_right * (n_right + 1) / 2) / max(1, n_right * n_wrong))


def best(texts: Sequence[Chains], values: Sequence[Floats], seconds: Sequence[float], drafted_token: float) -> Outcome:
    """Return the fastest way to draft with a rule, over lengths and thresholds."""
    drafted = [Drafted(text.kind, text.right, each) for text, each in zip(texts, values, strict=True)]

    def costs(n_most: int) -> Callable[[int], float]:
        return lambda n: seconds[n] / seconds[0] + min(n + 1, n_most) * drafted_token

    outcomes = []
    for n_most in range(1, _DEPTH + 1):
        for least in _THRESHOLDS:
            found = replay(drafted, costs(n_most), n_most, least)
            outcomes.append(replace(found, speed=found.speed / costs(n_most)(0)))  # a plain step drafts nothing
    return max(outcomes, key=lambda outcome: outcome.speed)


def judged(
    texts: Sequence[Chains], rules: Mapping[str, Sequence[Floats]], seconds: Sequence[float], prices: Sequence[float]
) -> dict[str, Any]:
    """Return for each rule how well it tells tokens apart, and its best speed for each price of a drafted token."""
    right = np.concatenate([text.right[text.reached] for text in texts])
    result = {}
    for name, values in rules.items():
        chance = np.concatenate([each[text.reached] for text, each in zip(texts, values, strict=True)])
        held = chance.astype(float).clip(1e-4, 1 - 1e-4)
        outcomes = {f"{price:.3f}": best(texts, values, seconds, price) for price in prices}
        result[name] = {
            "auc": round(auc(chance, right), 4),
            "log_loss": round(float(-np.where(right, np.log(held), np.log(1 - held)).mean()), 4),
            "best_by_price": {
                price: {key: round(value, 4) for key, value in asdict(outcome).items()}
                for price, outcome in outcomes.items()
            },
        }
        found = ", ".join(f"{price}: {outcome.speed:.4f}" for price, outcome in outcomes.items())
        print(
            f"{name:14} AUC {result[name]['auc']:.4f}  log loss {result[name]['log_loss']:.4f}  speed {found}",
            flush=True,
        )
    return result


def main() -> None:
    """Draft, fit, judge and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("head", type=Path)
    parser.add_argument("lessons", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder that keeps the chains")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head = load_head(args.head)
    measured = json.loads((args.head / RECORD_FILE).read_text(encoding="utf-8"))["about"]["report"]
    seconds = CostCurve({int(n): s for n, s in measured["curve_s"].items()}).up_to(1 + _DEPTH)
    weights = {name: torch.from_numpy(tensor.floats()) for name, tensor in head.tensors.items()}
    weights[TAP_SCALE] = torch.ones(weights["fc"].shape[1])  # fc of a finished head has the scale in it
    borrowed = Borrowed.of(TargetParts.of(read_gguf(args.model)), head.d2t, "cpu")
    texts = chains_of(head.card, weights, borrowed, held_back(args.lessons), args.work)
    result = {
        "head": head.card.name,
        "answers": len(texts),
        "chains": sum(len(text.right) for text in texts),
        "drafted_tokens_judged": int(sum(text.reached.sum() for text in texts)),
        "accepted_by_depth": [
            round(float(np.concatenate([t.right[:, k][t.reached[:, k]] for t in texts]).mean()), 4)
            for k in range(_DEPTH)
        ],
        "curve_s": measured["curve_s"],
        "rules": judged(texts, rules_of(texts), seconds, (measured["drafted_token"], measured["drafted_token"] / 2)),
    }
    report(result, args.json_out)


if __name__ == "__main__":
    main()
