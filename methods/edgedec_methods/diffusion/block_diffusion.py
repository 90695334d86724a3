"""Block diffusion: a text is written block by block, each of which is denoised in passes over all of its positions.

The session is one of a model whose rows say what stands at masked positions. To everything above it, it is a session as
any other: it returns a row of logits for the next token. It makes passes until that token is committed, and keeps the
rows by which positions were committed. A token is drawn of a committed row as of any row; where another one than the
committed token is drawn, as by a grammar, what stands behind it in the block is masked again.

The text depends on model, prompt, options, settings and seed alone. Keys and values of a block are evaluated once more
with its last tokens, in the forward of the next block's first pass.

Paper: Arriola et al. 2025, arXiv:2503.09573; Wu et al. 2025 (Fast-dLLM v2), arXiv:2509.26328
Option: a model's file decides; `--denoise RULE`
For: diffusion language models
Measured: a forward of 8 rows costs 3.5 steps of smollm2-135m, of 32 rows 12.9: so many tokens a forward break even
    (`python benchmarks/diffusion/compare_rules.py small.gguf --cost smollm2-135m`)
Status: opt-in
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import (
    CapabilityError,
    ContextFullError,
    OptionError,
    RequestError,
    SessionError,
    argument,
    counted,
)
from edgedec.logit_ops import LogitOps
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.pictures import Block
from edgedec.progress import OnProgress, report_progress
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec.sessions.outer_session import OuterModel, OuterSession, UnsavedSession
from edgedec.stats import DecodeStats
from edgedec_methods.diffusion.rules import Pass, Rule, rule_named

F32 = NDArray[np.float32]
Looked = tuple[F32, LogitOps]
"""The rows of masked positions, and the operations on them."""
_MOST_LENGTH = 32  # what memory plans count
_NEVER = np.float32(-1e30)  # a logit of what is never drawn


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model's file says (ModelCard.methods).

    Attributes:
        mask: The mask token.
        shift: Whether a row is of the position behind it.
        most_rows: Most rows of a forward.
        block: Positions of a block; None where rows see the whole text.
    """

    mask: int
    shift: bool
    most_rows: int
    block: int | None = None


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Implements edgedec.companion.Companion: how a diffusion language model writes.

    Attributes:
        denoise: Which positions a pass commits: a plug-in of `edgedec.denoising_rules`, perhaps with :NUMBER.
        length: Positions that are denoised together in a model whose rows see the whole text, 1 to 32.

    Raises:
        OptionError: There is no such rule, or a number is out of range.
    """

    denoise: str = "threshold"
    length: int = 32

    role: ClassVar[str] = ""
    what: ClassVar[str] = "a diffusion language model"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        rule_named(self.denoise)
        if not 1 <= self.length <= _MOST_LENGTH:
            raise OptionError("length", self.length, f"so many positions are 1 to {_MOST_LENGTH}")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session that denoises (RequestError where the model is no diffusion language model)."""
        card = target.model.card
        if "diffusion" not in card.methods:
            name = card.name or "the model"
            raise RequestError(f"{name} is no diffusion language model; leave {argument('denoise')} out")
        return DiffusionSession(target, self, Facts(**card.methods["diffusion"]))


class DiffusionModel(OuterModel):
    """Implements edgedec.model.Model: a model whose sessions return one row for the next token, and draft nothing."""

    def __init__(self, inner: Model, options: Diffusion, facts: Facts) -> None:
        names = ("trees", "fork", "layers", "taps", "hidden_input", "vector_rows", "positions", "keeps_prompts")
        off = dict.fromkeys(names, False)
        super().__init__(inner, inner.card, replace(inner.capabilities, **off, attention_mass=0, max_rows=1))
        self._options, self._facts = options, facts

    @property
    def batch_invariant(self) -> Literal[1]:
        """One row: each stands for passes of its own."""
        return 1

    def session(self, n_ctx: int) -> "DiffusionSession":
        """Open an empty session."""
        return DiffusionSession(self.inner.session(n_ctx), self._options, self._facts)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate items one after another."""
        return [replace(item.session.evaluate(item), is_own=True) for item in items]


@dataclass(slots=True)
class Opened:
    """The block that is being denoised.

    Attributes:
        start, end: Its positions.
        ids: Their tokens, the mask where none is committed.
        rule: Chooses what is committed.
        rows: By committed position, the row that its token is drawn from.
        passes: The passes so far.
        before: The row in front of the block, where that says what stands at its first position.
        ahead: The rows of later states of the block, by the tokens of the state; they were evaluated early.
        forks: The sessions that such states are evaluated on.
    """

    start: int
    end: int
    ids: list[int]
    rule: Rule
    rows: dict[int, F32] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    before: F32 | None = None
    ahead: dict[tuple[int, ...], Looked] = field(default_factory=dict)
    forks: list[Session] = field(default_factory=list)

    def close(self) -> None:
        """Close the forks."""
        for fork in self.forks:
            fork.close()


class DiffusionSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session: the rows of its forwards are those by which passes committed tokens.

    Args:
        inner: A session of the model; its rows must be bit-equal in any forward.
        options: The rule, and the length.
        facts: What the model's file says.

    Raises:
        CapabilityError: The context slides, or rows can't see each other there.
    """

    what = "a text that is being denoised"

    def __init__(self, inner: Session, options: Diffusion, facts: Facts) -> None:
        if not inner.model.capabilities.vector_rows:
            raise CapabilityError(
                f"rows can't see each other here; leave {argument('layer_skip')} out, or use the cpu runtime"
            )
        if inner.n_text_max != inner.n_ctx:
            raise CapabilityError("a diffusion language model can't write in a context that slides; leave that out")
        super().__init__(inner, DiffusionModel(inner.model, options, facts))
        self._facts, self._options = facts, options
        self._make_rule, self._n_ahead = rule_named(options.denoise)
        self._grid = Block(facts.block or facts.most_rows, 1, 1, mutual=True)
        self._ids: list[int] = []  # the text
        self._open: Opened | None = None
        self._n_clean = 0  # how many positions have keys and values of the text's own tokens, in whole blocks
        self._n_prompt: int | None = None
        self._end = self.n_ctx  # where the last position that may be written ends
        self._draws = SamplingParams(temperature=0.0)
        self._noise = Noise(0)
        self._n_passes = self._n_rows = 0

    @property
    def n_ctx(self) -> int:
        """Most tokens: where rows see the whole text, those of one forward."""
        return self.inner.n_ctx if self._facts.block else min(self.inner.n_ctx, self._facts.most_rows)

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were taken."""
        return len(self._ids)

    @contextmanager
    def generating(self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0) -> Iterator[None]:
        """Begin a text that ends with the block; `sampling` and `seed` draw the tokens that passes look at."""
        with self.inner.generating(n_prompt):
            self._leave()
            self._n_prompt, self._n_passes, self._n_rows = n_prompt, 0, 0
            self._draws, self._noise = sampling or SamplingParams(temperature=0.0), Noise(seed)
            most = self._draws.max_tokens
            self._end = self.n_ctx if most is None else min(self.n_ctx, n_prompt + most)
            try:
                yield
            finally:
                self._leave()
                self._n_prompt = None

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Take tokens of the text, and return the row that the next one is drawn from; see Session.forward.

        Raises:
            CapabilityError: The item is no chain of tokens, or wants other rows than the last one.
        """
        if item.tokens is None or not item.is_chain:
            raise CapabilityError("a diffusion language model takes chains of tokens, and nothing else")
        ids, n_past = item.tokens.tolist(), item.n_past
        named = {"all": range(len(ids)), "last": range(len(ids) - 1, len(ids))}
        rows = [int(row) for row in (named[item.rows] if isinstance(item.rows, str) else item.rows)]
        if rows not in ([], [len(ids) - 1]):
            raise CapabilityError("a forward of a diffusion language model returns the last row only")
        if not ids or not all(0 <= token < self.model.card.n_vocab for token in ids):
            raise RequestError(f"a token id is outside the vocabulary of {self.model.card.n_vocab}, or there is none")
        if not 0 <= n_past <= len(self._ids):
            raise SessionError(f"n_past is {n_past}; the session holds {counted(len(self._ids), 'token')}")
        if n_past + len(ids) >= self.n_ctx + (not rows):
            raise ContextFullError(f"{n_past + len(ids)} tokens leave no room in a context of {self.n_ctx}")
        n_prompt = n_past + len(ids) if self._n_prompt is None else self._n_prompt
        ids = self._cut(n_past, n_prompt) + ids
        for token in ids:
            if len(self._ids) >= n_prompt:
                self._row(n_prompt, None)
            self._take(token)
        logits = [self._row(n_prompt, on_progress)] if rows else []
        return Forward(np.array(logits, np.float32).reshape(len(rows), self.model.card.n_vocab))

    def adapt(self, scales: tuple[float, ...]) -> None:
        """Let the session inside have other scales of adapters; nothing of the text is held then."""
        super().adapt(scales)
        self._leave()
        self._ids, self._n_clean = [], 0

    def _cut(self, n_past: int, n_prompt: int) -> list[int]:
        """Forget what is behind `n_past`; return the written tokens of its block, to be taken once more."""
        if n_past == len(self._ids):
            return []
        kept = n_past if n_past <= n_prompt else max(n_prompt, self._start(n_past, n_prompt))
        again = self._ids[kept:n_past]
        del self._ids[kept:]
        self._leave()
        if self._facts.block:
            self._n_clean = min(self._n_clean, kept // self._facts.block * self._facts.block)
        return again

    def _leave(self) -> None:
        """Forget the open block."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def _start(self, place: int, n_prompt: int) -> int:
        """Return where the block of a position begins."""
        if self._facts.block:
            return place // self._facts.block * self._facts.block
        return place - (place - n_prompt) % self._options.length

    def _take(self, token: int) -> None:
        """Add a token to the text; where the open block has another one, what is behind it is masked again."""
        opened, place = self._open, len(self._ids)
        if opened is not None and place < opened.end and opened.ids[place - opened.start] != token:
            n_masked = opened.end - place - 1
            opened.ids[place - opened.start :] = [token, *[self._facts.mask] * n_masked]
            opened.rows, opened.passes, opened.ahead, opened.rule = {}, [], {}, self._make_rule()
        self._ids.append(token)

    def _row(self, n_prompt: int, on_progress: OnProgress | None) -> F32:
        """Return the row that the token behind the text is drawn from, after the passes that commit it."""
        place, size = len(self._ids), self._facts.block or self._options.length
        if self._open is None or place >= self._open.end:
            self._leave()
            start = self._start(place, n_prompt)
            end = min(start + size, self.n_ctx if self._facts.block else self._end)
            ids = [*self._ids[start:], *[self._facts.mask] * (end - place)]
            self._open = Opened(start, end, ids, self._make_rule())
        while place not in self._open.rows:
            self._pass(self._open, on_progress)
        return self._open.rows[place]

    def _pass(self, opened: Opened, on_progress: OnProgress | None) -> None:
        """Look at the open block once, and commit what the rule chooses."""
        facts, start = self._facts, opened.start
        places = self._masked(opened, opened.ids)
        found = opened.ahead.get(tuple(opened.ids))
        logits, ops = self._forward(opened, places, on_progress) if found is None else found
        logits[:, facts.mask] = _NEVER
        tokens, confidences = np.empty(len(places), np.int64), np.empty(len(places))
        for i, (place, row) in enumerate(zip(places.tolist(), logits, strict=True)):
            tokens[i] = draw(row, self._draws, self._ids, self._noise, place, ops)
            total = ops.total(row)
            confidences[i] = np.exp(float(row[tokens[i]]) - total.most) / total.weight
        opened.passes.append(Pass(opened.end - start, places - start, tokens, confidences, logits))
        chosen = opened.rule(opened.passes)
        opened.passes[-1] = replace(opened.passes[-1], logits=logits[:0])  # only those of the latest pass are kept
        for i, place in enumerate((places - start).tolist()):
            if place not in chosen:
                continue
            opened.ids[place] = token = chosen[place]
            row = logits[i].copy() if token == tokens[i] else np.full_like(logits[i], _NEVER)
            row[token] = row[token] if token == tokens[i] else 0.0
            opened.rows[start + place] = row

    def _masked(self, opened: Opened, ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the positions of the open block that are masked where its tokens are `ids`."""
        begin = max(0, len(self._ids) - opened.start)  # a prompt may hold the mask token
        return opened.start + begin + np.flatnonzero(np.array(ids[begin:]) == self._facts.mask)

    def _forward(self, opened: Opened, places: NDArray[np.int64], on_progress: OnProgress | None) -> Looked:
        """Evaluate what lacks keys and values, and the open block; return the rows of the masked positions."""
        facts, start, size = self._facts, opened.start, self._grid.n_rows
        first = 0 if facts.block is None else self._n_clean
        if facts.block is not None and facts.shift and places[0] == start and opened.before is None:
            first = min(first, start - size)
        while opened.end - first > facts.most_rows:
            n = min(facts.most_rows // size * size, start - first)
            self._evaluated([self._item(self.inner, self._ids[first : first + n], first, places[:0])])
            self._n_clean = first = first + n
            report_progress(on_progress, "prefill", first, start, "tokens")
        behind = [facts.mask] * (0 if facts.block else self._end - opened.end)
        states = [opened.ids, *(self._states_ahead(opened) if first in (0, start) else [])]
        wanted = [self._masked(opened, ids) for ids in states]
        items = [
            self._item(session, [*self._ids[first:start], *ids, *behind], first, rows - facts.shift - first)
            for session, ids, rows in zip(
                [self.inner, *self._forks(opened, len(states) - 1)], states, wanted, strict=True
            )
        ]
        forwards = self._evaluated(items)
        self._n_clean = start if facts.block else 0
        self._n_passes += 1
        if facts.shift and places[0] == start and first < start:
            opened.before = forwards[0].logits[0].copy()
        looked = []
        for forward, rows in zip(forwards, wanted, strict=True):
            logits = forward.logits if forward.is_own or len(items) == 1 else forward.logits.copy()  # they are kept
            if facts.shift and len(rows) > len(logits):
                assert opened.before is not None, "the first pass of a block evaluates the row before it"
                logits = np.concatenate([opened.before[None], logits])
            looked.append((logits, forward.ops))
        opened.ahead = dict(zip(map(tuple, states[1:]), looked[1:], strict=True))
        return looked[0]

    def _states_ahead(self, opened: Opened) -> list[list[int]]:
        """Return what the block becomes in later passes, if each commits the most confident token of the latest one."""
        if not self._n_ahead or not opened.passes:
            return []
        latest, ids = opened.passes[-1], list(opened.ids)
        states: list[list[int]] = []
        for i in np.argsort(-latest.confidences, kind="stable").tolist():
            if ids[place := int(latest.places[i])] == self._facts.mask and len(states) < self._n_ahead:
                ids[place] = int(latest.tokens[i])
                states.append(list(ids))
        return [state for state in states if self._facts.mask in state]

    def _forks(self, opened: Opened, n: int) -> list[Session]:
        """Return `n` sessions beside the inner one, for states ahead; they live as long as the block."""
        while len(opened.forks) < n:
            opened.forks.append(self.inner.fork())
        return opened.forks[:n]

    def _item(self, session: Session, ids: Sequence[int], n_past: int, rows: NDArray[np.int64]) -> ForwardItem:
        wanted = rows[rows >= 0].astype(np.int32)
        return ForwardItem(session, n_past, np.array(ids, np.int32), rows=wanted, block=self._grid)

    def _evaluated(self, items: list[ForwardItem]) -> list[Forward]:
        self._n_rows += sum(item.n_rows for item in items)
        return [self.inner.evaluate(items[0])] if len(items) == 1 else self.inner.model.forward(items)

    def count_text(self, stats: DecodeStats, n_generated: int) -> None:
        """Say in the explanation how many passes the text took."""
        self.inner.count_text(stats, n_generated)
        if self._n_passes:
            size = self._facts.block or self._options.length
            stats.explanation.append(
                f"diffusion: {counted(n_generated, 'token')} in {self._n_passes} forwards over blocks of {size} "
                f"positions, {n_generated / self._n_passes:.2f} tokens a forward; the rule is {self._options.denoise}; "
                f"{self._n_rows} rows were evaluated"
            )

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Raise SessionError: a diffusion language model evaluates no trees."""
        raise SessionError("keep() follows a tree, and a diffusion language model takes none")

    def _refusal(self, action: str) -> CapabilityError:
        return CapabilityError(f"{self.what} can't be {action}")
