"""Block diffusion: a text is written block by block, each of which is denoised in passes over all of its positions.

The session is one of a model whose rows say what stands at masked positions. To everything above it, it is a session as
any other: it returns a row of logits for the next token. It makes passes until that token is committed, and keeps the
rows by which positions were committed. A token is drawn of a committed row as of any row; where another one than the
committed token is drawn, as by a grammar, what stands behind it in the block is masked again.

The text depends on model, prompt, options, settings and seed alone. Keys and values of a block are evaluated once more
with its last tokens, in the forward of the next block's first pass.

Paper: Arriola et al. 2025, arXiv:2503.09573; Wu et al. 2025 (Fast-dLLM v2), arXiv:2509.26328
Option: a model's file decides; `--method diffusion:RULE`
For: diffusion language models
Measured: forwards of 8, 16 and 32 rows cost 3.0, 5.7 and 11.1 steps of smollm2-135m: so many tokens a forward break
    even (`python benchmarks/diffusion/compare_rules.py small.gguf --cost smollm2-135m`)
Status: opt-in
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import (
    CapabilityError,
    ContextFullError,
    EdgedecError,
    OptionError,
    RequestError,
    SessionError,
    argument,
    counted,
)
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.progress import OnProgress
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec.sessions.outer_session import OuterModel, OuterSession, UnsavedSession
from edgedec.stats import DecodeStats
from edgedec_methods.diffusion.forwards import F32, Facts, Forwards, Opened
from edgedec_methods.diffusion.rules import MASKED, Pass, denoising_named
from edgedec_runtimes.shared.denoising import MOST_LENGTH

_NEVER = np.float32(-1e30)  # a logit of what is never drawn
_MOST_PASSES = 3  # of a rule that revises, for each position of a block


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Implements edgedec.companion.Companion: how a diffusion language model writes.

    Attributes:
        denoise: Which positions a pass commits: a denoising rule, perhaps with :NUMBER. Behind a
            comma may stand what a pass evaluates, which is one of them, too.
        length: Positions that are denoised together in a model whose rows see the whole text, 1 to 32.

    Raises:
        OptionError: There is no such rule, or a number is out of range.
    """

    denoise: str = "threshold"
    length: int = MOST_LENGTH

    role: ClassVar[str] = ""
    what: ClassVar[str] = "a diffusion language model"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        denoising_named(self.denoise)
        if not 1 <= self.length <= MOST_LENGTH:
            raise OptionError("length", self.length, f"so many positions are 1 to {MOST_LENGTH}")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session that denoises (RequestError where the model is no diffusion language model)."""
        card = target.model.card
        if "diffusion" not in card.methods:
            name = card.name or "the model"
            raise RequestError(f"{name} is no diffusion language model; leave {argument('denoise')} out")
        return DiffusionSession(target, self, Facts(**card.methods["diffusion"]))


class DiffusionModel(OuterModel):
    """Implements edgedec.model.Model: a model whose sessions return one row for the next token, and draft nothing."""

    batch_invariant: Literal[True] = True  # each row comes from passes of its own, so nothing else changes it

    def __init__(self, inner: Model, options: Diffusion, facts: Facts) -> None:
        names = ("trees", "layers", "groups", "taps", "hidden_input", "vector_rows", "positions", "keeps_prompts")
        off = dict.fromkeys(names, False)
        super().__init__(inner, inner.card, replace(inner.capabilities, **off, attention_mass=0, max_rows=1))
        self._options, self._facts = options, facts

    def session(self, n_ctx: int) -> "DiffusionSession":
        """Open an empty session."""
        return DiffusionSession(self.inner.session(n_ctx), self._options, self._facts)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate items one after another."""
        return [replace(item.session.evaluate(item), is_own=True) for item in items]


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
        if inner.room(0) != inner.n_ctx:
            raise CapabilityError("a diffusion language model can't write in a context that slides; leave that out")
        super().__init__(inner, DiffusionModel(inner.model, options, facts))
        self._facts, self._options, self._tokenizer = facts, options, inner.model.tokenizer
        self._size = facts.block or facts.window or options.length
        rule = denoising_named(options.denoise)
        if (rule.layout is not None or rule.ends is not None) and (facts.block or facts.window):
            advice = "this model's rows don't see a whole text; give a rule of blocks of one size, alone"
            raise OptionError("denoise", options.denoise, advice)
        if rule.revises and facts.window:
            raise OptionError("denoise", options.denoise, "this model's rows can't look at committed positions")
        if (rule.layout is not None or facts.window is not None) and not inner.model.capabilities.positions:
            raise CapabilityError("rows can't have positions of their own here; use the cpu runtime")
        self._rule, self._revises, self._ends = rule.rule, rule.revises, rule.ends
        self._starts: list[int] = []  # of blocks whose ends move, but for the first one
        self._forwards = Forwards(inner, facts, rule.layout, rule.n_ahead)
        self._ids: list[int] = []  # the text
        self._open: Opened | None = None
        self._n_prompt: int | None = None
        self._end = self.n_ctx  # where the last position that may be written ends
        self._draws = SamplingParams(temperature=0.0)
        self._noise = Noise(0)

    @property
    def n_ctx(self) -> int:
        """Most tokens: where rows see the whole text, those of one forward."""
        facts = self._facts
        return self.inner.n_ctx if facts.block or facts.window else min(self.inner.n_ctx, facts.most_rows)

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were taken."""
        return len(self._ids)

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """Begin a text that ends with the block; `sampling` and `seed` draw the tokens that passes look at."""
        with self.inner.generating(n_prompt, stats=stats):
            self._leave()
            self._n_prompt = n_prompt
            self._forwards.begin()
            self._draws, self._noise = sampling or SamplingParams(temperature=0.0), Noise(seed)
            most = self._draws.max_tokens
            self._end = self.n_ctx if most is None else min(self.n_ctx, n_prompt + most)
            try:
                yield
            finally:
                self._leave()
                self._n_prompt = None
                if stats is not None:
                    self._count(stats)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Take tokens of the text, and return the row that the next one is drawn from; see Session.forward.

        Raises:
            CapabilityError: The item is no chain of tokens, or wants other rows than the last one.
        """
        if item.chain is None:
            raise CapabilityError("a diffusion language model takes chains of tokens, and nothing else")
        ids, n_past, rows = item.chain.tolist(), item.n_past, item.logit_rows.tolist()
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

    def fork(self) -> "DiffusionSession":
        """Open a second session with the same text.

        Of a block that is not finished, only the tokens of the text are taken over; the new session denoises the rest.
        """
        twin = DiffusionSession(self.inner.fork(), self._options, self._facts)
        twin._ids, twin._starts = list(self._ids), list(self._starts)
        twin._forwards.go_on_from(self._forwards)
        return twin

    def _emptied(self) -> None:
        self._leave()
        self._ids = []
        self._forwards.forget_all()

    def _cut(self, n_past: int, n_prompt: int) -> list[int]:
        """Forget what is behind `n_past`; return the written tokens of its block, to be taken once more."""
        if n_past == len(self._ids):
            return []
        n_past_kept = n_past if n_past <= n_prompt else max(n_prompt, self._start(n_past, n_prompt))
        again = self._ids[n_past_kept:n_past]
        del self._ids[n_past_kept:]
        self._leave()
        self._forwards.forget(n_past_kept)
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
        moved = [start for start in self._starts if n_prompt <= start <= place]
        return max(moved) if moved else place - (place - n_prompt) % self._size

    def _take(self, token: int) -> None:
        """Add a token to the text; where the open block has another one, what is behind it is masked again."""
        opened, place = self._open, len(self._ids)
        if opened is not None and place < opened.end and opened.ids[place - opened.start] != token:
            n_masked = opened.end - place - 1
            opened.ids[place - opened.start :] = [token, *[self._facts.mask] * n_masked]
            opened.rows, opened.passes, opened.ahead, opened.is_done = {}, [], {}, False
        if opened is not None and self._revises:
            opened.n_known = place - opened.start + 1  # what was shown stays
        self._ids.append(token)

    def _row(self, n_prompt: int, on_progress: OnProgress | None) -> F32:
        """Return the row that the token behind the text is drawn from, after the passes that commit it."""
        place = len(self._ids)
        if self._open is None or place >= self._open.end:
            self._leave()
            start = self._start(place, n_prompt)
            end = min(start + self._size, self.n_ctx if self._facts.block else self._end)
            ids = [*self._ids[start:], *[self._facts.mask] * (end - place)]
            self._open = Opened(start, end, place - start, ids, self._tokenizer.is_end, revises=self._revises)
        if place not in self._open.rows:
            self._open.is_done = not self._revises
        while place not in self._open.rows or not self._open.is_done:
            self._pass(self._open, on_progress)
        return self._open.rows[place]

    def _pass(self, opened: Opened, on_progress: OnProgress | None) -> None:
        """Look at the open block once, and commit what the rule chooses."""
        mask, start = self._facts.mask, opened.start
        places = opened.masked(opened.ids, mask)
        logits, ops = self._forwards.looked(self._ids, opened, self._end, on_progress)
        logits[:, mask] = _NEVER
        tokens, confidences = np.empty(len(places), np.int64), np.empty(len(places))
        for i, (place, row) in enumerate(zip(places.tolist(), logits, strict=True)):
            tokens[i] = draw(row, self._draws, self._ids, self._noise, place, ops)
            total = ops.total(row)
            confidences[i] = np.exp(float(row[tokens[i]]) - total.most) / total.weight
        ends = np.array([self._tokenizer.is_end(token) for token in tokens.tolist()], np.bool_)
        pieces = tuple(map(self._tokenizer.piece, tokens.tolist()))
        stand = np.array([opened.ids[place] for place in (places - start).tolist()])
        committed = np.where(stand == mask, MASKED, stand) if self._revises else None
        size = opened.end - start
        its = Pass(size, places - start, tokens, confidences, logits, ends, pieces, committed)
        if self._ends is not None and not opened.passes:
            its = its.first(self._ends(its))
            places, opened.end = its.places + start, start + its.size
            del opened.ids[its.size :]
            self._starts = [*(each for each in self._starts if each <= start), opened.end]
        opened.passes.append(its)
        chosen = self._rule(opened.passes)
        if self._revises and len(opened.passes) >= _MOST_PASSES * size:  # it goes on as it stands
            still = stand == mask
            chosen = dict(zip((places[still] - start).tolist(), tokens[still].tolist(), strict=True))
            opened.is_done = True
        opened.passes[-1] = replace(opened.passes[-1], logits=logits[:0])  # only those of the latest pass are kept
        for i, place in enumerate((places - start).tolist()):
            if place not in chosen:
                continue
            if chosen[place] == MASKED:
                opened.ids[place] = mask
                opened.rows.pop(start + place, None)
                continue
            opened.ids[place] = token = chosen[place]
            row = logits[i].copy() if token == tokens[i] else np.full_like(logits[i], _NEVER)
            row[token] = row[token] if token == tokens[i] else 0.0
            opened.rows[start + place] = row
        after = np.array([opened.ids[place] for place in (places - start).tolist()])
        opened.is_done = opened.is_done or (not (after == mask).any() and bool((after == stand).all()))

    def _count(self, stats: DecodeStats) -> None:
        """Say in the explanation how many passes the text took, and how many tokens of each would pay."""
        n_generated = stats.n_generated_tokens
        n_passes, n_rows, n_narrow = self._forwards.n_passes, self._forwards.n_rows, self._forwards.n_narrow
        if not n_passes:
            return
        even, size = "", f"{'up to ' if self._ends else ''}{self._size}"
        with suppress(EdgedecError):  # of a closed session nothing is told
            if (cost := self._forwards.cost()) is not None:
                even = f", where {cost:.1f} would be as fast as plain decoding by a model of this size"
        stats.explanation.append(
            f"diffusion: {counted(n_generated, 'token')} in {n_passes} forwards over blocks of {size} positions, "
            f"{n_generated / n_passes:.2f} tokens a forward{even}; the rule is {self._options.denoise}; {n_rows} rows "
            "were evaluated" + (f"; {n_narrow} had no room for states ahead" if n_narrow else "")
        )

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Raise SessionError: a diffusion language model evaluates no trees."""
        raise SessionError("keep() follows a tree, and a diffusion language model takes none")

    def _refusal(self, action: str) -> CapabilityError:
        return CapabilityError(f"{self.what} can't be {action}")
