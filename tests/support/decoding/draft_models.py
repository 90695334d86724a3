"""Draft models for tests: tiny ones on the cpu runtime, with what was evaluated and proposed written down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import edgedec
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.scheduler import plugin_guard
from edgedec.sequence import Generation
from edgedec_runtimes.cpu.runtime import Cpu
from support.models.tiny_models import tiny_llama

TEXT = "the cat sat on the mat, the dog sat on the log, the cat sat on the "
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 1.0},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {99: 2.0}},
}


def tiny(folder: Path, seed: int) -> Path:
    """Write a model that is quick to run."""
    return tiny_llama(folder / f"{seed}.gguf", seed=seed, n_embd=32, n_head=2, n_head_kv=1, n_ff=48, n_ctx_train=1024)


def loaded(path: Path) -> Model:
    """Load it."""
    return Cpu().load(path, LoadOptions(n_ctx=512, n_threads=1))


def generate(path: Path, draft: DrafterFactory | None, n_tokens: int = 40, **options: Any) -> Generation:
    """Generate after TEXT on the cpu runtime, with a drafter pinned or without one, in this thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_guard, "GuardedFactory", lambda factory: factory)
        engine = edgedec.load(path, runtime="cpu", n_threads=1, n_ctx=512, draft=draft, n_draft_max=8)
    with engine:
        found = engine.generate(TEXT, max_tokens=n_tokens, seed=5, ignore_end=True, **options)
        assert found.stats.reasons == []
        return found


class Counted:
    """A session that notes every prefix that it evaluates the last token of."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: list[int] = []
        self.prefixes: list[tuple[int, ...]] = []
        self.rows: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def evaluate(self, item: ForwardItem) -> Forward:
        """Evaluate, and note it."""
        forward = self._session.evaluate(replace(item, session=self._session))
        tokens, n_past = item.groups[0].tokens, item.n_past
        assert tokens is not None, "drafts are made of tokens"
        self.rows.append(item.rows)
        self._held[n_past:] = tokens.tolist()
        self.prefixes += [tuple(self._held[: n + 1]) for n in range(n_past, len(self._held))]
        return forward

    @property
    def n_forwards(self) -> int:
        """How often something was evaluated."""
        return len(self.rows)

    def assert_evaluated_once(self, text: Sequence[int]) -> None:
        """Check that no token of a text was evaluated twice, and the window began with the text."""
        on_text = [prefix for prefix in self.prefixes if prefix == tuple(text[: len(prefix)])]
        assert len(on_text) == len(set(on_text)) >= len(text) - 16


def counted(source: DraftModel) -> Counted:
    """Count what a draft model evaluates from here on."""
    found = Counted(source.texts[0].session)
    source.texts[0].session = cast(Session, found)
    return found


@dataclass(slots=True)
class Recorded:
    """A factory of drafters that writes down every draft with what became of it."""

    factory: DrafterFactory
    steps: list[tuple[Draft, Verification]] = field(default_factory=list)

    def __call__(self, context: DraftContext) -> Drafter:
        """Make a drafter."""
        return _Recorded(self.steps, self.factory(context))

    @property
    def drafts(self) -> list[tuple[list[int], list[int]]]:
        """The drafts' tokens and parents."""
        return [(list(draft.tokens), list(draft.parents)) for draft, _ in self.steps]

    def assert_all_accepted(self) -> None:
        """Check that every draft's longest path was accepted to its end."""
        assert [len(outcome.path) for _, outcome in self.steps] == [depth(draft) for draft, _ in self.steps]
        assert len(self.steps) >= 3


@dataclass(slots=True)
class _Recorded:
    steps: list[tuple[Draft, Verification]]
    drafter: Drafter
    latest: Draft | None = None

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    def begin(self, token_ids: Sequence[int]) -> None:
        self.drafter.begin(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        self.latest = self.drafter.propose(n_max, deadline_s + 60)
        return self.latest

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        self.drafter.learn(verification, hidden)
        if self.latest is not None:
            self.steps.append((self.latest, verification))
        self.latest = None

    def memory_bytes(self) -> int:
        return self.drafter.memory_bytes()


def depth(draft: Draft) -> int:
    """Return the length of a draft's longest path."""
    depths: list[int] = []
    for parent in list(draft.parents):
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)
