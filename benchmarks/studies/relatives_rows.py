"""Rows that draft in the target's own layers, in torch: parallel prompt decoding (PPD) and hidden transfer.

Behind the newest token t of the text stand three rows that are no tokens. Each sees the text and the rows before it.
The target's layers turn the first into a draft of token t + 2, the next into one of t + 3, and so on; token t + 1 is
what the target itself chooses at t, and no drafting row has seen it.

- PPD (arXiv:2405.18628): the rows enter layer 0, and are three trained embeddings.
- Hidden transfer (arXiv:2404.12022): the rows enter a middle layer, and are what three trained matrices make of the
  state with which token t enters that layer.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from relatives_learning import STEP_WEIGHT, cut_by_lesson
from relatives_llama import Cache, TorchLlama

from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor, Weights, cross_entropy, target_shares
from edgedec_export.training.optimizing import Optimizers
from edgedec_export.training.simulation import Drafted

N_ROWS = 3
"""Drafting rows behind a place, at most."""

_GROUPS_AT_ONCE = 256


class Rows(Protocol):
    """Drafting rows.

    Attributes:
        weights: Their tensors, which learn.
        rates: The highest learning rates of matrices and of vectors.
        layer: The layer that they enter.
    """

    weights: Weights
    rates: tuple[float, float]
    layer: int

    def text(self, lesson: Lesson) -> Tensor:
        """Return float32[n - 1, n_embd], what enters the layer of a lesson's tokens but the last."""

    def behind(self, states: Tensor) -> Tensor:
        """Return float32[n, N_ROWS, n_embd], what enters the layer behind n places with these states."""


class Prompts:
    """Implements Rows for PPD.

    Args:
        llama: The target.
        first: The tokens whose embeddings the rows begin as.
    """

    rates = (0.0, 0.01)
    layer = 0

    def __init__(self, llama: TorchLlama, first: NDArray[np.integer]) -> None:
        self._llama = llama
        rows = torch.from_numpy(llama.parts.embeddings(first))
        self.weights = {f"embedding{k}": rows[k].clone().requires_grad_() for k in range(N_ROWS)}

    def text(self, lesson: Lesson) -> Tensor:
        """Return the embeddings of a lesson's tokens but the last."""
        return self._llama.embeddings(lesson.token_ids[:-1])

    def behind(self, states: Tensor) -> Tensor:
        """Return the trained embeddings, whatever the states are."""
        return torch.stack(list(self.weights.values())).expand(len(states), -1, -1)


class Transfer:
    """Implements Rows for hidden transfer, at the middle one of the tapped layers.

    A row begins as the state itself. What is added to that is made of the state divided by the usual sizes of its
    elements, and multiplied by these.

    Args:
        llama: The target.
        tap_scale: float32[3 * n_embd], the usual sizes of the elements of the taps.
    """

    rates = (8e-3, 5e-3)

    def __init__(self, llama: TorchLlama, tap_scale: NDArray[np.float32]) -> None:
        n = llama.parts.network.n_embd
        self.layer, self._columns = llama.parts.taps[1], slice(n, 2 * n)
        self._sizes = torch.from_numpy(tap_scale[self._columns].copy())
        self.weights = {f"added{k}": torch.zeros(n, n) for k in range(N_ROWS)}
        self.weights |= {f"kept{k}": torch.ones(n) for k in range(N_ROWS)}
        for values in self.weights.values():
            values.requires_grad_()

    def text(self, lesson: Lesson) -> Tensor:
        """Return what enters the layer: the lesson's tap."""
        return torch.from_numpy(lesson.taps[:, self._columns].astype(np.float32))

    def behind(self, states: Tensor) -> Tensor:
        """Return what the matrices make of states."""
        w, scaled = self.weights, states / self._sizes
        return torch.stack(
            [w[f"kept{k}"] * states + self._sizes * F.linear(scaled, w[f"added{k}"]) for k in range(N_ROWS)], 1
        )


class RowsLearner:
    """Drafting rows that learn, from one lesson after the other.

    Args:
        llama: The target.
        rows: The rows.
        n_places: Places of a lesson behind which they stand to learn.

    Attributes:
        weights: The rows' tensors, which every lesson changes.
    """

    def __init__(self, llama: TorchLlama, rows: Rows, n_places: int = 96) -> None:
        self._llama, self._rows, self._n_places = llama, rows, n_places
        self.weights = rows.weights
        self._optimizers = Optimizers(self.weights, *rows.rates)
        self._n_learned = 0

    def learn(self, lessons: Sequence[Lesson], part: float) -> float:
        """Learn from lessons and return the mean of their losses, in nats; `part` of the training is over, 0 to 1."""
        return float(np.mean([self._learn(lesson, part) for lesson in lessons]))

    def _learn(self, lesson: Lesson, part: float) -> float:
        llama = self._llama
        draw = np.random.default_rng(self._n_learned)
        places = np.sort(draw.permutation(lesson.n_answer - 1)[: self._n_places])
        with torch.no_grad():
            norm, epsilon = torch.from_numpy(llama.parts.output_norm), llama.parts.network.rms_epsilon
            shares = target_shares(torch.from_numpy(lesson.last), norm, llama.output, epsilon)
        text = self._rows.text(lesson)
        outputs = self._outputs(text, llama.read(text, self._rows.layer)[1], torch.from_numpy(places), lesson.n_prompt)
        loss, handle = 0.0, torch.zeros(())
        for k in range(N_ROWS):
            inside = torch.from_numpy(places + k + 1 < lesson.n_answer)
            which = torch.from_numpy(places + k + 1)[inside]
            found, gradient = cross_entropy(outputs[inside, k].detach(), shares, which, llama.output)
            loss += STEP_WEIGHT**k * float(found)
            handle = handle + STEP_WEIGHT**k * (outputs[inside, k] * gradient).sum()
        self._optimizers.descend(handle, part)
        self._n_learned += 1
        return loss

    def _outputs(self, text: Tensor, past: Cache, places: Tensor, n_prompt: int) -> Tensor:
        """Return float32[n, N_ROWS, n_embd], what the output matrix turns into logits, for rows before n tokens.

        Args:
            text: What enters the layer of a lesson's tokens.
            past: The cache of these tokens.
            places: int64[n], tokens of the answer by number: the rows stand behind the token before each.
            n_prompt: Tokens of the prompt.
        """
        after = places + n_prompt - 1
        n, behind = len(after), self._rows.behind(text[after])
        group, number = torch.arange(n).repeat_interleave(N_ROWS), torch.arange(N_ROWS).repeat(n)
        sees_text = torch.arange(len(text)) <= after[group][:, None]
        sees_rows = (group[:, None] == group) & (number <= number[:, None])
        sees, positions = torch.cat([sees_text, sees_rows], 1), after[group] + 1 + number
        x, _ = self._llama.evaluate(behind.flatten(0, 1), positions, sees, past, self._rows.layer)
        return self._llama.outputs(x).view(n, N_ROWS, -1)

    def drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what the rows draft after each token of each lesson's answer; lessons of one token are left out.

        Args:
            weights: Their own tensors.
            lessons: The lessons.
        """
        assert weights is self.weights, "rows are measured as they are"
        found: list[Drafted] = []
        with torch.no_grad():
            for lesson in lessons:
                if lesson.n_answer > 1:
                    found += self._drafted(lesson)
        return found

    def _drafted(self, lesson: Lesson) -> list[Drafted]:
        shape = lesson.n_answer, N_ROWS
        right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        answer, text = lesson.token_ids[lesson.n_prompt :], self._rows.text(lesson)
        _, past = self._llama.read(text, self._rows.layer)
        for places in torch.arange(lesson.n_answer - 1).split(_GROUPS_AT_ONCE):
            outputs = self._outputs(text, past, places, lesson.n_prompt)
            logits = F.linear(outputs.to(self._llama.output.dtype), self._llama.output).float()
            best, token = logits.softmax(-1).max(-1)
            for k in range(N_ROWS):
                inside = places.numpy() + k + 1 < lesson.n_answer
                rows = places.numpy()[inside]
                right[rows, k] = token[:, k].numpy()[inside] == answer[rows + k + 1]
                sure[rows, k] = best[:, k].numpy()[inside]
        return cut_by_lesson([lesson], right, sure)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return self._optimizers.state() | {"n_learned": self._n_learned}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self._optimizers.restore(state)
        self._n_learned = state["n_learned"]
