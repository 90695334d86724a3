"""Clover, Chimera and FSPAD: what their training form gives is what drafting token by token gives."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.trained_heads.card import HeadCard

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "studies"))
if True:  # after the skip
    from relatives_chains import Chain, Chimera, Clover, Fspad
    from relatives_learning import Learner

    from edgedec_export.training.batches import batch_of
    from edgedec_export.training.learning import Borrowed

F64 = NDArray[np.float64]
KeyAndValue = tuple[F64, F64]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
SHORT_LIST = np.arange(0, 80, 2, dtype=np.int32)


class OneByOne:
    """Drafts from a text token by token, with a list of keys and values, in float64.

    Args:
        network: The network, whose tensors are read.
        card: Its shape.
        parts: The target.
        taps: [n, n_taps * n_embd], of the tokens whose forward is done.
        token_ids: The text, and the tokens drafted so far.
    """

    def __init__(
        self, network: Chain, card: HeadCard, parts: TargetParts, taps: NDArray[np.float16], token_ids: Sequence[int]
    ) -> None:
        self.w = {name: values.detach().double().numpy() for name, values in network.weights.items()}
        self.card = card
        self.tokens = parts.embeddings(np.array(token_ids)).astype(np.float64)
        self.features = (taps.astype(np.float64) / self.w["tap_scale"]) @ self.w["fc"].T
        self.newest = len(taps) - 1  # the last row whose state is known

    def norm(self, x: F64, name: str) -> F64:
        """Return a row, normed and weighted."""
        found: F64 = x / np.sqrt(np.square(x).mean() + self.card.rms_epsilon) * self.w[name]
        return found

    def heads(self, name: str, normed: F64, position: int | None = None) -> F64:
        """Return [heads, head_dim], turned to a position if given."""
        x: F64 = (self.w[name] @ normed).reshape(-1, self.card.head_dim)
        if position is None:
            return x
        half = self.card.head_dim // 2
        angles = position * self.card.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin], 1)

    def kept(self, normed: F64, position: int) -> KeyAndValue:
        """Return a row's keys and values."""
        return self.heads("k", normed, position), self.heads("v", normed)

    def mixed(self, normed: F64, position: int, cache: Sequence[KeyAndValue]) -> F64:
        """Return what attention adds to a row that sees the cache."""
        q, found = self.heads("q", normed, position), []
        for head in range(self.card.n_head):
            group = head // (self.card.n_head // self.card.n_head_kv)
            scores = np.array([q[head] @ keys[group] for keys, _ in cache]) / np.sqrt(self.card.head_dim)
            share = np.exp(scores - scores.max())
            found.append(sum(s * values[group] for s, (_, values) in zip(share / share.sum(), cache, strict=True)))
        out: F64 = self.w["o"] @ np.concatenate(found)
        return out

    def inner(self, x: F64) -> F64:
        """Return what the feed-forward block adds to a row."""
        normed = self.norm(x, "post_attention_norm")
        found: F64 = self.w["down"] @ (_silu(self.w["gate"] @ normed) * (self.w["up"] @ normed))
        return found


def _silu(x: F64) -> F64:
    found: F64 = x / (1 + np.exp(-x))
    return found


def _unit(x: F64) -> F64:
    found: F64 = x / np.sqrt(np.square(x).mean() + 1e-6)
    return found


def clover(d: OneByOne, k: int) -> F64:
    """Return what Clover gives for token k of a draft."""

    def taken(state: F64, token: F64, cell: str) -> F64:
        shape = (-1, d.card.head_dim)
        q = (d.w[f"{cell}_q"] @ d.norm(state, f"{cell}_norm")).reshape(shape)
        keys = (d.w[f"{cell}_k"] @ _unit(token)).reshape(shape)
        alike = (q * keys).sum(1) / np.linalg.norm(q, axis=1) / np.linalg.norm(keys, axis=1)
        found: F64 = state + ((d.w[f"{cell}_v"] @ _unit(token)).reshape(shape) * alike[:, None]).ravel()
        return found

    rows = [taken(d.features[i], d.tokens[i + 1], "first") for i in range(d.newest + 1)]
    normed = [d.norm(row, "input_norm") for row in rows]
    x = rows[-1] + d.mixed(normed[-1], d.newest, [d.kept(row, i) for i, row in enumerate(normed)])
    state = d.norm(x + d.inner(x), "layer_norm")
    y: F64 = d.w["alone"] @ state
    for j in range(1, k + 1):
        token = d.tokens[d.newest + 1 + j]
        state = taken(state, token, "next")
        y = d.w["joined"] @ np.concatenate([state, _unit(token)])
    return d.norm(y, "output_norm")


def chimera(d: OneByOne, k: int) -> F64:
    """Return what Chimera gives for token k of a draft."""
    cache = [d.kept(d.norm(row, "input_norm"), i) for i, row in enumerate(d.features)]
    for j in range(k + 1):
        at = d.newest + 1 + j
        gram = np.concatenate([_unit(d.tokens[max(0, i)]) for i in (at - 2, at - 1, at)])
        x: F64 = d.w["gram"] @ (gram + _silu(d.w["gram_inner"] @ gram))
        normed = d.norm(x, "input_norm")
        x = x + d.mixed(normed, at, [*cache, d.kept(normed, at)])
        x = x + d.inner(x)
        cache.append(d.kept(d.norm(x, "input_norm"), at))
    return d.norm(d.w["joined"] @ np.concatenate([d.features[d.newest], x]), "output_norm")


def fspad(d: OneByOne, k: int) -> F64:
    """Return what FSPAD gives for token k of a draft."""
    cache: list[KeyAndValue] = []

    def passed(state: F64, i: int) -> tuple[F64, F64]:
        token = d.norm(d.tokens[i + 1], "input_norm")
        a = d.w["enter"] @ np.concatenate([token, d.norm(state, "hidden_norm")])
        gate = _silu(d.w["enter_gate"] @ d.norm(a, "enter_norm"))
        a = a + d.w["enter_down"] @ (gate * (d.w["enter_up"] @ token))
        normed = d.norm(a, "attention_norm")
        cache.append(d.kept(normed, i))
        x = state + a + d.mixed(normed, i, cache)
        for_logits, for_next = np.split(d.inner(x), 2)
        return d.norm(x + for_logits, "output_norm"), x + for_next

    for i, feature in enumerate(d.features):
        y, state = passed(feature, i)
    for j in range(1, k + 1):
        y, state = passed(state, d.newest + j)
    return y


@pytest.mark.parametrize(("kind", "draft"), [(Clover, clover), (Chimera, chimera), (Fspad, fspad)])
def test_training_gives_what_drafting_token_by_token_gives(
    kind: type[Chain],
    draft: Callable[[OneByOne, int], F64],
    parts: TargetParts,
    make_lessons: Callable[..., list[Lesson]],
) -> None:
    """Every step at every place of two answers, after some learning."""
    card = card_of(parts, "", len(SHORT_LIST), None)
    borrowed = Borrowed.of(parts, SHORT_LIST, "cpu")
    scale = np.random.default_rng(1).uniform(0.5, 2, 3 * card.n_embd).astype(np.float32)
    network = kind(card, borrowed, scale)
    lessons = make_lessons([(3, 7), (1, 5)], n_embd=parts.network.n_embd)
    learner = Learner(network, borrowed)  # type: ignore[arg-type]
    for _ in range(3):
        learner.learn(lessons, 0.3)
    n_steps, n_checked = 4, 0
    batch = batch_of(lessons, n_steps)
    with torch.no_grad():
        steps = [step.outputs.numpy() for step in network.steps(batch)]  # type: ignore[attr-defined]
    for k in range(n_steps):
        for found, at in zip(steps[k], batch.at[k], strict=True):
            lesson, t = lessons[at // batch.taps.shape[1]], int(at % batch.taps.shape[1])
            known = OneByOne(network, card, parts, lesson.taps[: t + 1], lesson.token_ids[: t + 2 + k].tolist())
            assert_allclose(found, draft(known, k), rtol=2e-3, atol=2e-4)
            n_checked += 1
    assert n_checked == (6 + 5 + 4 + 3) + (4 + 3 + 2 + 1)
