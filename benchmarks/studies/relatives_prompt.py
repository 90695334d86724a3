"""Parallel prompt decoding (PPD, arXiv:2405.18628) in torch: a target that drafts by itself, for three trained tokens.

Rows with trained embeddings, the prompt tokens, stand behind the newest token t of the text. Each sees the text and the
prompt tokens before it. The target's own layers turn the first into a draft of token t + 2, the next into one of t + 3,
and so on; token t + 1 is what the target itself chooses at t, and no prompt token has seen it. Nothing else is trained.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from relatives_heads import cut_by_lesson

from edgedec.errors import UnsupportedModelError
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor, cross_entropy, target_shares
from edgedec_export.training.optimizing import rate_at
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.weights.levels import dequantize

N_PROMPT_TOKENS = 3

_RATE = 0.01
_STEP_WEIGHT = 0.8  # of each further prompt token in the loss, as for heads
_GROUPS_AT_ONCE = 256
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

Cache = list[tuple[Tensor, Tensor]]
"""Of each layer the keys, rotated to their positions, and the values: [n_head_kv, n, head_dim]."""


@dataclass(frozen=True, slots=True)
class TorchLlama:
    """A llama's weights in torch, dequantized: matrices in `dtype`, norms in float32.

    Attributes:
        parts: The file.
        tensors: By the file's names.
        output: [n_vocab, n_embd], the output matrix.
    """

    parts: TargetParts
    tensors: Mapping[str, Tensor]
    output: Tensor

    @classmethod
    def of(cls, parts: TargetParts, dtype: Any = torch.bfloat16) -> "TorchLlama":
        """Return the model of a file.

        Raises:
            UnsupportedModelError: The file's architecture is not llama.
        """
        if parts.network.architecture != "llama":
            raise UnsupportedModelError(
                f"{parts.gguf.paths[0]}: the architecture is {parts.network.architecture!r}; prompt tokens are "
                "measured for 'llama' only"
            )
        tensors = {}
        for name, info in parts.gguf.tensors.items():
            if name.startswith("blk."):
                n_rows = info.shape[1] if len(info.shape) == 2 else 1
                data = np.frombuffer(parts.gguf.read_tensor_bytes(name), np.uint8).reshape(n_rows, -1)
                values = torch.from_numpy(dequantize(info.type, data))
                tensors[name] = values.to(dtype) if len(info.shape) == 2 else values[0].float()
        output = torch.from_numpy(parts.output_rows(np.arange(parts.network.n_vocab))).to(dtype)
        return cls(parts, tensors, output)

    def evaluate(self, x: Tensor, positions: Tensor, sees: Tensor, past: Cache) -> tuple[Tensor, Cache]:
        """Return float32[n, n_embd], what leaves the last layer, and the cache with these rows at its end.

        Args:
            x: float32[n, n_embd], embeddings.
            positions: int64[n].
            sees: bool[n, n_past + n], which cached rows, and which of these, each row sees.
            past: The cache; a list of no layers where it is empty.
        """
        network, cache = self.parts.network, []
        turns = _turns(positions, network.head_dim, network.rope_base)
        for i in range(network.n_layer):
            w = {name: self.tensors[f"blk.{i}.{name}.weight"] for name in (*_MATRICES, "attn_norm", "ffn_norm")}
            normed = self.norm(x, w["attn_norm"]).to(w["attn_q"].dtype)
            q, k, v = (self._heads(normed, w[name]) for name in ("attn_q", "attn_k", "attn_v"))
            q, k = (_rotate(found, turns, interleaved=network.switches.rope_interleaved) for found in (q, k))
            if past:
                k, v = torch.cat([past[i][0], k], 1), torch.cat([past[i][1], v], 1)
            cache.append((k, v))
            groups = network.n_head // network.n_head_kv
            keys, values = (kept.repeat_interleave(groups, 0)[None] for kept in (k, v))
            mixed = F.scaled_dot_product_attention(q[None], keys, values, attn_mask=sees)[0]
            x = x + F.linear(mixed.transpose(0, 1).flatten(1), w["attn_output"])
            normed = self.norm(x, w["ffn_norm"]).to(w["ffn_gate"].dtype)
            inner = F.silu(F.linear(normed, w["ffn_gate"])) * F.linear(normed, w["ffn_up"])
            x = x + F.linear(inner, w["ffn_down"])
        return x, cache

    def read(self, token_ids: NDArray[np.int32]) -> tuple[Tensor, Cache]:
        """Return what evaluate() returns for a text from its beginning; nothing of it has a gradient."""
        n = len(token_ids)
        with torch.no_grad():
            embeddings = torch.from_numpy(self.parts.embeddings(token_ids))
            return self.evaluate(embeddings, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril(), [])

    def outputs(self, x: Tensor) -> Tensor:
        """Return float32[n, n_embd], what the output matrix turns into logits."""
        return self.norm(x, torch.from_numpy(self.parts.output_norm))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x, normed over its last axis and weighted, float32."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.parts.network.rms_epsilon) * weight

    def _heads(self, x: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(x, matrix).view(len(x), -1, self.parts.network.head_dim).transpose(0, 1)


def _turns(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    speeds = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[:, None] * speeds
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Return [n_head, n, head_dim] turned: neighbours of a head with each other, or its two halves."""
    cos, sin = turns
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def draft_outputs(llama: TorchLlama, embeddings: Tensor, after: Tensor, past: Cache) -> Tensor:
    """Return float32[n, k, n_embd], what the output matrix turns into logits, for prompt tokens behind n places.

    Args:
        llama: The target.
        embeddings: float32[k, n_embd], the prompt tokens'.
        after: int64[n], the positions of the text behind which they stand.
        past: The text's cache.
    """
    n, k, n_text = len(after), len(embeddings), past[0][0].shape[1]
    group, number = torch.arange(n).repeat_interleave(k), torch.arange(k).repeat(n)
    sees_text = torch.arange(n_text) <= after[group][:, None]
    sees_rows = (group[:, None] == group) & (number <= number[:, None])
    sees = torch.cat([sees_text, sees_rows], 1)
    x, _ = llama.evaluate(embeddings.repeat(n, 1), after[group] + 1 + number, sees, past)
    return llama.outputs(x).view(n, k, -1)


class PromptLearner:
    """Prompt tokens that learn, by AdamW, from single lessons.

    Attributes:
        llama: The target.
        embeddings: float32[N_PROMPT_TOKENS, n_embd], which every step changes.
    """

    def __init__(self, llama: TorchLlama, first: NDArray[np.integer], n_places: int = 96, seed: int = 0) -> None:
        """Args: `first`: the tokens whose embeddings they begin as; `n_places`: places of a lesson to learn from."""
        self.llama, self._n_places = llama, n_places
        self.embeddings = torch.from_numpy(llama.parts.embeddings(first)).clone().requires_grad_()
        self._optimizer = torch.optim.AdamW([self.embeddings], lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._seed, self._n_learned = seed, 0

    def places(self, lesson: Lesson) -> NDArray[np.int64]:
        """Return tokens of the answer, by number, that prompt tokens stand before, drawn at random, ascending."""
        draw = np.random.default_rng([self._seed, self._n_learned])
        return np.sort(draw.permutation(lesson.n_answer - 1)[: self._n_places])

    def learn(self, lesson: Lesson, places: NDArray[np.int64], part: float) -> float:
        """Learn from a lesson and return the loss, in nats; `part` is how much of the training is over."""
        llama = self.llama
        with torch.no_grad():
            _, past = llama.read(lesson.token_ids)
            shares = target_shares(
                torch.from_numpy(lesson.last),
                torch.from_numpy(llama.parts.output_norm),
                llama.output,
                llama.parts.network.rms_epsilon,
            )
        outputs = draft_outputs(llama, self.embeddings, torch.from_numpy(places + lesson.n_prompt - 1), past)
        loss, handle = 0.0, torch.zeros(())
        for k in range(N_PROMPT_TOKENS):
            inside = torch.from_numpy(places + k + 1 < lesson.n_answer)
            which = torch.from_numpy(places + k + 1)[inside]
            found, gradient = cross_entropy(outputs[inside, k].detach(), shares, which, llama.output)
            loss += _STEP_WEIGHT**k * float(found)
            handle = handle + _STEP_WEIGHT**k * (outputs[inside, k] * gradient).sum()
        self._optimizer.zero_grad(set_to_none=True)
        handle.backward()
        torch.nn.utils.clip_grad_norm_([self.embeddings], 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(part) * _RATE
        self._optimizer.step()
        self._n_learned += 1
        return loss

    def drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what the prompt tokens draft after each token of each lesson's answer."""
        found: list[Drafted] = []
        for lesson in lessons:
            found += self._drafted(lesson)
        return found

    def _drafted(self, lesson: Lesson) -> list[Drafted]:
        shape = lesson.n_answer, N_PROMPT_TOKENS
        right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        answer = lesson.token_ids[lesson.n_prompt :]
        with torch.no_grad():
            _, past = self.llama.read(lesson.token_ids)
            for places in torch.arange(lesson.n_answer - 1).split(_GROUPS_AT_ONCE):
                outputs = draft_outputs(self.llama, self.embeddings, places + lesson.n_prompt - 1, past)
                logits = F.linear(outputs.to(self.llama.output.dtype), self.llama.output).float()
                best, token = logits.softmax(-1).max(-1)
                for k in range(N_PROMPT_TOKENS):
                    inside = places.numpy() + k + 1 < lesson.n_answer
                    rows = places.numpy()[inside]
                    right[rows, k] = token[:, k].numpy()[inside] == answer[rows + k + 1]
                    sure[rows, k] = best[:, k].numpy()[inside]
        return cut_by_lesson([lesson], right, sure)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return {
            "weights": {"embeddings": self.embeddings.detach()},
            "optimizer": self._optimizer.state_dict(),
            "n_learned": self._n_learned,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        with torch.no_grad():
            self.embeddings.copy_(state["weights"]["embeddings"])
        self._optimizer.load_state_dict(deepcopy(state["optimizer"]))
        self._n_learned = state["n_learned"]


def agreement(llama: TorchLlama, lessons: Sequence[Lesson]) -> float:
    """Return the share of the answers' places where this model's most probable token is the one in the lessons."""
    n_same = n_all = 0
    with torch.no_grad():
        for lesson in lessons:
            x, _ = llama.read(lesson.token_ids[:-1])
            rows = llama.outputs(x[lesson.n_prompt - 1 :]).to(llama.output.dtype)
            best = F.linear(rows, llama.output).argmax(-1).numpy()
            n_same, n_all = n_same + int((best == lesson.best).sum()), n_all + lesson.n_answer
    return n_same / n_all
