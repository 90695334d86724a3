"""A narrow draft model as a student: learns the target's distribution on the target's own answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.arithmetic import in_product_type
from edgedec_export.training.batches import grouped_by_length
from edgedec_export.training.learning import Borrowed, Drafting, Student
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.narrow.shape import NarrowShape
from edgedec_export.training.network import Tensor, Weights, cross_entropy, most_probable, rms
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts

_RATE = 1e-3  # larger ones undo what the first layers of the target and the fitted output bring
_RIDGE = 1e-3  # of the mean square of a state's element


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Some lessons side by side: B texts of at most T tokens, N tokens of answers.

    Attributes:
        token_ids: int64[B, T], padded with zeros.
        last: f16[N, H], what left the target's last layer where each token of an answer was chosen.
        at: int64[N], the rows after which these tokens come, as indices into [B * T].
    """

    token_ids: NDArray[np.int64]
    last: NDArray[np.float16]
    at: NDArray[np.int64]

    @classmethod
    def of(cls, lessons: Sequence[Lesson]) -> "Texts":
        """Return at least one lesson as a batch."""
        n_rows = max(len(lesson.token_ids) for lesson in lessons)
        token_ids, at = np.zeros((len(lessons), n_rows), np.int64), []
        for i, lesson in enumerate(lessons):
            n = len(lesson.token_ids)
            token_ids[i, :n] = lesson.token_ids
            at.append(np.arange(lesson.n_prompt - 1, n - 1) + i * n_rows)
        return cls(token_ids, np.concatenate([lesson.last for lesson in lessons]), np.concatenate(at))


class NarrowStudent(Student):
    """A narrow draft model that learns.

    Args:
        parts: The target.
        shape: The draft model's shape.
        weights: Its first tensors, of `initial.initial_weights`.
        token_ids: int32[n], the tokens among which the two distributions are compared.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        parts: TargetParts,
        shape: NarrowShape,
        weights: dict[str, NDArray[np.float32]],
        token_ids: NDArray[np.int32],
        device: str,
    ) -> None:
        tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
        borrowed = Borrowed.of(parts, token_ids, device)
        super().__init__(borrowed, tensors, shape.rms_epsilon, matrix_rate=_RATE, vector_rate=_RATE)
        self.shape = shape

    def _loss(self, lessons: Sequence[Lesson], part: float) -> tuple[Tensor, Tensor]:
        texts = Texts.of(lessons)
        outputs = self._outputs(self.weights, texts)
        which = torch.arange(len(texts.at), device=self._borrowed.device)
        loss, gradient = cross_entropy(outputs.detach(), self._shares(texts.last), which, self._borrowed.rows)
        return loss, (outputs.float() * gradient).sum()

    def fit_output(self, lessons: Sequence[Lesson]) -> None:
        """Set `leave` to the matrix with which the outputs come nearest to the target's, by least squares.

        One pass over the lessons, without the vocabulary.
        """
        width, n_out, device = self.shape.n_embd, self._borrowed.parts.network.n_embd, self._borrowed.device
        squares = torch.zeros(width, width, dtype=torch.float64, device=device)
        products = torch.zeros(width, n_out, dtype=torch.float64, device=device)
        with torch.no_grad(), in_product_type(device):
            for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer], self.n_rows):
                texts = Texts.of(group)
                states = self._states(self.weights, texts).double()
                wide = self._on(texts.last).double()
                scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.rms_epsilon)
                squares += states.T @ states
                products += states.T @ (wide * scale * self._borrowed.norm)
        ridge = _RIDGE * squares.trace() / width * torch.eye(width, dtype=torch.float64, device=device)
        with torch.no_grad():
            self.weights["leave"].copy_(torch.linalg.solve(squares + ridge, products).T)

    def _outputs(self, weights: Weights, texts: Texts) -> Tensor:
        """Return [N, target's width], whose products with the target's output rows are the logits."""
        return F.linear(self._states(weights, texts), weights["leave"])

    def _states(self, weights: Weights, texts: Texts) -> Tensor:
        """Return [N, width], the states before the tokens of the answers."""
        states = states_of(self.shape, weights, self._borrowed.embeddings(texts.token_ids)).flatten(0, 1)
        return states[self._on(texts.at)]

    def _drafting(self, weights: Weights) -> Drafting:
        every = Borrowed.of(self._borrowed.parts, np.arange(self.shape.n_vocab), self._borrowed.device)

        def drafted(lessons: Sequence[Lesson]) -> list[Drafted]:  # from the whole vocabulary
            best, sure = most_probable(self._outputs(weights, Texts.of(lessons)), every.rows)
            ends = np.cumsum([lesson.n_answer for lesson in lessons])[:-1]
            parts = zip(lessons, np.split(best, ends), np.split(sure, ends), strict=True)
            return [drafts_of(lesson, tokens, chances) for lesson, tokens, chances in parts]

        return drafted


def drafts_of(lesson: Lesson, best: NDArray[np.int64], sure: NDArray[np.float32]) -> Drafted:
    """Return the drafts that begin after each token of an answer but the last one.

    Token number k of a draft after token i is what the model writes after token i + k, given that it was right so far.

    Args:
        lesson: The lesson.
        best: int64[n_answer], the model's token in the place of each token of the answer.
        sure: float32[n_answer], its probability.
    """
    n, right = lesson.n_answer, best == lesson.token_ids[lesson.n_prompt :]
    places = np.arange(1, n)[:, None] + np.arange(MOST_DRAFTED)
    inside = np.minimum(places, n - 1)
    return Drafted(lesson.kind, right[inside] & (places < n), np.where(places < n, sure[inside], 0).astype(np.float32))


def states_of(shape: NarrowShape, weights: Weights, embeddings: Tensor) -> Tensor:
    """Return [B, T, n_embd], the states after the last layer and the norm behind it; the rest as in exit_states()."""
    (states,) = exit_states(shape, weights, embeddings, (shape.n_layer,))
    return states


def exit_states(shape: NarrowShape, weights: Weights, embeddings: Tensor, exits: Sequence[int]) -> list[Tensor]:
    """Return for each exit [B, T, n_embd], the states that the last norm makes of what leaves so many layers.

    Args:
        shape: The model's shape.
        weights: Its tensors, by the names of `initial.initial_weights`.
        embeddings: f32[B, T, target's width], the target's embeddings of the texts; what follows a text does not
            change its states.
        exits: Numbers of layers, ascending.
    """
    x = F.linear(embeddings, weights["enter"].T)
    turns, states = _turns(shape, embeddings), []
    for i in range(exits[-1]):
        layer = {name.partition(".")[2]: values for name, values in weights.items() if name.startswith(f"{i}.")}
        x = x + F.linear(_attention(shape, layer, rms(x, layer["attn_norm"], shape), turns), layer["o"])
        inner = rms(x, layer["ffn_norm"], shape)
        x = x + F.linear(F.silu(F.linear(inner, layer["gate"])) * F.linear(inner, layer["up"]), layer["down"])
        if i + 1 in exits:
            states.append(rms(x, weights["output_norm"], shape))
    return states


def _attention(shape: NarrowShape, layer: Weights, x: Tensor, turns: Tensor) -> Tensor:
    """Return [B, T, n_head * head_dim]: each row sees itself and the rows before."""
    n_batch, n_rows, _ = x.shape

    def heads(name: str) -> Tensor:
        heads_of_rows = F.linear(x, layer[name], layer.get(f"{name}_bias"))
        return heads_of_rows.view(n_batch, n_rows, -1, shape.head_dim).transpose(1, 2)

    q, k, v = _rotated(heads("q"), shape.n_rot, turns), _rotated(heads("k"), shape.n_rot, turns), heads("v")
    groups = shape.n_head // shape.n_head_kv
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(shape.head_dim))
    return out.transpose(1, 2).reshape(n_batch, n_rows, -1)


def _turns(shape: NarrowShape, like: Tensor) -> Tensor:
    """Return f32[2, T, n_rot / 2], the cosines and sines of the positions 0, 1, 2, ..."""
    steps = torch.arange(0, shape.n_rot, 2, device=like.device, dtype=torch.float64)
    speeds = shape.rope_base ** (-steps / shape.n_rot)
    angles = torch.arange(like.shape[1], device=like.device, dtype=torch.float64)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()]).float()


def _rotated(x: Tensor, n_rot: int, turns: Tensor) -> Tensor:
    """Return [..., T, head_dim] turned to their positions: element 2 i with 2 i + 1."""
    a, b = x[..., 0:n_rot:2].float(), x[..., 1:n_rot:2].float()
    cos, sin = turns
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., n_rot:]], -1)
