"""An exit head as a student: an attention block behind the target's first layers (Kangaroo, arXiv:2404.18911).

The states that it sees while it drafts are the target's own, those of drafted tokens too. So one pass over a text says
what it drafts behind every token, however deep in a draft: nothing is unrolled.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.source import read_vector
from edgedec_export.training.learning import Borrowed, Drafting, Student
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor, Weights, attend, cross_entropy, heads_of, rms
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import HeadTensor, to_halves

_MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}


def new_exit(parts: TargetParts) -> Weights:
    """Return the tensors of a head that has learned nothing: the attention block of the layer that it stands before."""
    gguf, at = usual_tensors(parts.gguf, parts.network), parts.taps[0]
    weights = {"output_norm": torch.from_numpy(parts.output_norm.copy())}
    weights["input_norm"] = torch.from_numpy(read_vector(gguf, f"blk.{at}.attn_norm.weight").copy())
    for name, theirs in _MATRICES.items():
        info = gguf.tensors[f"blk.{at}.{theirs}.weight"]
        tensor = HeadTensor(info.shape[::-1], info.type, np.frombuffer(gguf.read_tensor_bytes(info.name), np.uint8))
        if name in ("q", "k") and parts.network.switches.rope_interleaved:
            tensor = to_halves(tensor, info.shape[1] // parts.network.head_dim)
        weights[name] = torch.from_numpy(tensor.floats())
    return weights


class ExitStudent(Student):
    """An exit head that learns.

    Args:
        parts: The target.
        card: The head's card.
        token_ids: int32[n], the tokens that it can draft.
        device: "cpu" or "cuda".
    """

    def __init__(self, parts: TargetParts, card: HeadCard, token_ids: NDArray[np.int32], *, device: str) -> None:
        super().__init__(Borrowed.of(parts, token_ids, device), new_exit(parts), card.rms_epsilon)
        self._card = card
        self._can_draft = np.zeros(card.n_vocab_target, np.bool_)
        self._can_draft[token_ids] = True

    def _outputs(self, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        """Return f32[B, T, n_embd], what the output matrix turns into logits behind each token of lessons."""
        n, n_rows = self._card.n_embd, max(len(lesson.token_ids) for lesson in lessons) - 1
        states = np.zeros((len(lessons), n_rows, n), np.float32)
        for i, lesson in enumerate(lessons):
            states[i, : len(lesson.taps)] = lesson.taps[:, :n]
        x = self._on(states)
        read = rms(x, weights["input_norm"], self._card)
        q, k = (heads_of(read, weights[name], self._card, 0) for name in ("q", "k"))
        mixed = attend(q, (k, heads_of(read, weights["v"], self._card)), [])
        x = x + F.linear(mixed, weights["o"]).float()
        return rms(x, weights["output_norm"], self._card)

    def _loss(self, lessons: Sequence[Lesson], part: float) -> tuple[Tensor, Tensor]:
        b, outputs = self._borrowed, self._outputs(self.weights, lessons)
        at, which, first = list[NDArray[np.int64]](), list[NDArray[np.int64]](), 0
        for i, lesson in enumerate(lessons):
            chosen = np.flatnonzero(self._can_draft[lesson.best])
            at.append(i * outputs.shape[1] + lesson.n_prompt - 1 + chosen)
            which.append(first + chosen)
            first += lesson.n_answer
        shares = self._shares(np.concatenate([lesson.last for lesson in lessons]))
        y = outputs.flatten(0, 1)[self._on(np.concatenate(at))]
        loss, gradient = cross_entropy(y.detach(), shares, self._on(np.concatenate(which)), b.rows)
        return loss, (y * gradient).sum()

    def _drafting(self, weights: Weights) -> Drafting:
        return lambda lessons: self._drafted(weights, lessons)

    def _drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        outputs, drafts = self._outputs(weights, lessons), list[Drafted]()
        for lesson, rows in zip(lessons, outputs, strict=True):
            behind = rows[lesson.n_prompt : lesson.n_prompt + lesson.n_answer - 1].to(self._borrowed.rows.dtype)
            best, token = F.linear(behind, self._borrowed.rows).float().softmax(-1).max(-1)
            drafted = self._borrowed.token_ids[token.cpu().numpy()]
            hits, sure = drafted == lesson.token_ids[lesson.n_prompt + 1 :], best.cpu().numpy()
            shape = len(hits), MOST_DRAFTED
            text = Drafted(lesson.kind, np.zeros(shape, np.bool_), np.zeros(shape, np.float32))
            for k in range(min(MOST_DRAFTED, len(hits))):
                text.right[: len(hits) - k, k], text.sure[: len(hits) - k, k] = hits[k:], sure[k:]
            drafts.append(text)
        return drafts
