"""Rows that draft in the target's own layers, as what learns: hidden transfer and parallel prompt decoding (PPD).

Behind the newest token t of the text stand rows that are no tokens. Each sees the text and the rows before it. The
target's layers turn the first into a draft of token t + 2, the next into one of t + 3, and so on; token t + 1 is what
the target itself chooses at t, and no drafting row has seen it.

- Hidden transfer (arXiv:2404.12022): the rows enter a middle layer, and are what a matrix each makes of the state with
  which token t enters that layer.
- PPD (arXiv:2405.18628): the rows enter layer 0, and are trained embeddings.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.batches import tap_scale
from edgedec_export.training.learning import VECTOR_RATE, Borrowed, Drafting, Student
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import TAP_SCALE, Tensor, Weights, cross_entropy
from edgedec_export.training.rows.llama import Cache, TorchLlama
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import RowShape

STEP_WEIGHT = 0.8  # of each further row's loss, as Medusa and EAGLE-3 have it
N_PLACES = 96  # of a lesson, behind which rows stand to learn
_GROUPS_AT_ONCE = 256
_PROMPT_RATE = 0.01


def new_rows(parts: TargetParts, shape: RowShape, token_ids: NDArray[np.int32], lessons: Sequence[Lesson]) -> Weights:
    """Return the tensors of rows that have learned nothing.

    A row of hidden transfer begins as the state itself; what is added to that is made of the state divided by the usual
    sizes of its elements, and multiplied by these. A row of PPD begins as the embedding of a frequent token.
    """
    n, weights = parts.network.n_embd, dict[str, Tensor]()
    if not shape.layer:
        first = torch.from_numpy(parts.embeddings(token_ids[: shape.n]))
        return {f"base{k}": first[k].clone() for k in range(shape.n)}
    for k in range(shape.n):
        weights |= {f"rows{k}": torch.zeros(n, n), f"kept{k}": torch.ones(n)}
    return weights | {TAP_SCALE: torch.from_numpy(tap_scale(lessons)[n : 2 * n].copy())}


def joined(arrays: dict[str, NDArray[np.float32]], shape: RowShape) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a row head, by the names of edgedec_runtimes.trained_heads.head."""
    rows = range(shape.n)
    if not shape.layer:
        return {"rows_base": np.concatenate([arrays[f"base{k}"] for k in rows])}
    sizes = arrays[TAP_SCALE]
    matrices = [sizes[:, None] * arrays[f"rows{k}"] / sizes for k in rows]
    return {"rows": np.concatenate(matrices), "rows_kept": np.concatenate([arrays[f"kept{k}"] for k in rows])}


class RowStudent(Student):
    """Rows that learn.

    Args:
        parts: The target.
        shape: How many rows, and the layer that they enter.
        token_ids: int32[n], the tokens that they can draft, the most frequent first.
        lessons: Some lessons, for the usual sizes of states.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        parts: TargetParts,
        shape: RowShape,
        token_ids: NDArray[np.int32],
        lessons: Sequence[Lesson],
        *,
        device: str,
    ) -> None:
        weights, borrowed = new_rows(parts, shape, token_ids, lessons), Borrowed.of(parts, token_ids, device)
        vector_rate = VECTOR_RATE if shape.layer else _PROMPT_RATE
        super().__init__(borrowed, weights, parts.network.rms_epsilon, vector_rate=vector_rate)
        self._shape = shape
        self._llama = TorchLlama.of(parts, device=device, first=shape.layer)
        self._places = np.full(parts.network.n_vocab, -1, np.int64)
        self._places[token_ids] = np.arange(len(token_ids))

    def _loss(self, lessons: Sequence[Lesson], part: float) -> tuple[Tensor, Tensor]:
        loss, handle = torch.zeros(()), torch.zeros((), device=self._borrowed.device)
        for lesson in lessons:
            seed = [
                lesson.n_answer,
                int(lesson.token_ids.sum()),
                round(1e6 * part),
            ]  # a training that goes on draws alike
            places = np.sort(np.random.default_rng(seed).permutation(lesson.n_answer - 1)[:N_PLACES])
            text, shares = self._text(lesson), self._shares(lesson.last)
            cached = self._llama.read(text, self._shape.layer)[1]
            outputs = self._outputs(self.weights, text, cached, places, lesson.n_prompt)
            foreseen = places[:, None] + 1 + np.arange(self._shape.n)
            for k in range(self._shape.n):
                inside = foreseen[:, k] < lesson.n_answer
                inside[inside] &= self._places[lesson.best[foreseen[inside, k]]] >= 0
                which = self._on(foreseen[inside, k])
                y = outputs[self._on(np.flatnonzero(inside)), k]
                mean, gradient = cross_entropy(y.detach(), shares, which, self._borrowed.rows)
                weight = STEP_WEIGHT**k / len(lessons)
                loss, handle = loss + weight * mean.cpu(), handle + weight * (y * gradient).sum()
        return loss, handle

    def _text(self, lesson: Lesson) -> Tensor:
        """Return float32[n - 1, n_embd], what enters the rows' layer of a lesson's tokens but the last."""
        if not self._shape.layer:
            return self._borrowed.embeddings(lesson.token_ids[:-1])
        n = self._llama.parts.network.n_embd
        return self._on(lesson.taps[:, n : 2 * n].astype(np.float32))

    def _behind(self, weights: Weights, states: Tensor) -> Tensor:
        """Return float32[n, rows, n_embd], what enters the layer behind n places with these states."""
        rows = range(self._shape.n)
        if not self._shape.layer:
            return torch.stack([weights[f"base{k}"] for k in rows]).expand(len(states), -1, -1)
        sizes = weights[TAP_SCALE]
        made = [weights[f"kept{k}"] * states + sizes * F.linear(states / sizes, weights[f"rows{k}"]) for k in rows]
        return torch.stack(made, 1).float()

    def _outputs(
        self, weights: Weights, text: Tensor, cached: Cache, places: NDArray[np.int64], n_prompt: int
    ) -> Tensor:
        """Return float32[n, rows, n_embd], what the output matrix turns into logits, for rows before n tokens.

        Args:
            weights: The tensors.
            text: What enters the layer of a lesson's tokens.
            cached: The keys and values of these tokens.
            places: int64[n], tokens of the answer by number: the rows stand behind the token before each.
            n_prompt: Tokens of the prompt.
        """
        after, n_rows = self._on(places + n_prompt - 1), self._shape.n
        behind = self._behind(weights, text[after])
        group = torch.arange(len(after), device=after.device).repeat_interleave(n_rows)
        number = torch.arange(n_rows, device=after.device).repeat(len(after))
        sees_text = torch.arange(len(text), device=after.device) <= after[group][:, None]
        sees_rows = (group[:, None] == group) & (number <= number[:, None])
        sees, positions = torch.cat([sees_text, sees_rows], 1), after[group] + 1 + number
        x, _ = self._llama.evaluate(behind.flatten(0, 1), positions, sees, cached, self._shape.layer)
        return self._llama.norm(x, self._borrowed.norm).view(len(after), n_rows, -1)

    def _drafting(self, weights: Weights) -> Drafting:
        return lambda lessons: [self._drafted(weights, lesson) for lesson in lessons]

    def _drafted(self, weights: Weights, lesson: Lesson) -> Drafted:
        shape = lesson.n_answer - 1, self._shape.n
        right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        answer, text = lesson.token_ids[lesson.n_prompt :], self._text(lesson)
        cached = self._llama.read(text, self._shape.layer)[1]
        for places in np.array_split(np.arange(shape[0]), 1 + shape[0] // _GROUPS_AT_ONCE):
            outputs = self._outputs(weights, text, cached, places, lesson.n_prompt)
            rows = self._borrowed.rows
            best, token = F.linear(outputs.to(rows.dtype), rows).float().softmax(-1).max(-1)
            drafted = self._borrowed.token_ids[token.cpu().numpy()]
            for k in range(self._shape.n):
                inside = places[places + k + 1 < lesson.n_answer]
                right[inside, k] = drafted[: len(inside), k] == answer[inside + k + 1]
                sure[inside, k] = best[: len(inside), k].cpu().numpy()
        return Drafted(lesson.kind, right, sure)
