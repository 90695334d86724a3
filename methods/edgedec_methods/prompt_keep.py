"""SpecPC: a small model reads a long prompt, and its attention says which part of the prompt the target reads.

The first quarter of the reading model's layers evaluates the whole prompt. How much its heads attend from the last
WINDOW tokens to each token is the token's worth: the most that a head gives, later rows counting more. (The paper takes
the later layers. Here the first quarter has the line that a question is about among its best 30 % in 15 of 15 documents
of 8,000 tokens, and costs a quarter.) The worth of a token is also that of its neighbours, so stretches are kept, not
words. The target reads the tokens of the highest worth, as if they followed one another. The first and the last tokens
of the prompt and the frame of a chat (control tokens, and what follows them) are always read. Without a reading model,
the target's own first layers read.

Lossy: what was left out is not known to the target. The text depends on the models, the share that is kept, the prompt,
the settings and the seed, and on nothing else.

Paper: SpecPC, Galim et al. 2025, arXiv:2506.08373; own first layers as GemFilter, Shi et al. 2024, arXiv:2409.17422
Option: `--method prompt-keep:0.3,model=MODEL`
For: long documents, where the first token is waited for
Measured: 1.5B, 8,441 tokens, 0.3 of them: first token in 0.42 of the time; right 16 of 40 (19), 11 of 20 needles (17)
Status: opt-in
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, ContextFullError, OptionError, SessionError, argument, counted
from edgedec.head_state import HeadState
from edgedec.model import ExactRows, Forward, ForwardItem, RowGroup, Session, Span
from edgedec.progress import OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sequence import n_common
from edgedec.sessions.outer_session import OuterSession, UnsavedSession
from edgedec.stats import DecodeStats
from edgedec.tokenizer import Tokenizer
from edgedec_methods.sliding_window import tokens_of, with_tokens

WINDOW = 64
"""Rows, the last of a prompt, whose attention counts."""
POOL = 32
"""Tokens that have the worth of the best one among them."""
FIRST, LAST, FRAME = 32, 128, 4
"""Tokens that are always read: the first and the last ones of a prompt, and each control token with those behind it."""
LEAST = 256
"""A prompt is not cut to fewer tokens than these."""
DEPTH = 1 / 4
"""The part of a model's layers that reads a whole prompt; of them, the attention of the first third does not count."""
_NO_ROWS = np.empty(0, np.int32)
_NONE = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class PromptKeep:
    """Implements edgedec.companion.Companion: the options of reading a prompt in part.

    Attributes:
        keep: The share of a prompt's tokens that the target reads.
        model: The smaller model that reads all of the prompt, named as the target is; None for the target's own first
            layers.

    Raises:
        OptionError: The share is not above 0 and at most 1, or not given.
    """

    keep: float | None = None
    model: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise OptionError("prompt_keep", self.keep, "it is the share of a prompt that is read, such as 0.3")

    @property
    def role(self) -> str:
        """What the further model is called; empty without one."""
        return "" if self.model is None else "reading model"

    @property
    def what(self) -> str:
        """What the method makes of its models."""
        return "prompts that are read in part" if self.model is None else "a model and its reading model"

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session that reads prompts in part.

        Raises:
            CapabilityError: A runtime can't return the mass of attention, the target can't go back or leave layers
                out, or its context slides.
        """
        assert self.keep is not None, "it is checked"
        target.model.capabilities.require("rollback", target.model.card.runtime)
        if target.room(0) != target.n_ctx:
            raise CapabilityError(f"a context that slides can't be read in part; leave {argument('slide')} out")
        return KeptSession(target, Reader(companion or target, is_target=companion is None), self.keep)


class Reader:
    """Reads whole prompts, and says what each token is worth.

    Attributes:
        session: What it reads with.
        is_target: Whether that is the target's session, whose first layers read. What it held is lost then.
    """

    def __init__(self, session: Session, *, is_target: bool) -> None:
        """Take a session (CapabilityError where its model can't return the mass of attention)."""
        capabilities, card = session.model.capabilities, session.model.card
        for name in ("attention_mass", "layers", "rollback"):
            capabilities.require(name, card.runtime)
        self.session, self.is_target = session, is_target
        n_layer = math.ceil(card.n_layer * DEPTH)
        self._span = Span(leave=n_layer)
        self._heard = tuple(range(n_layer // 3, n_layer))
        self._ids: Sequence[int] = ()  # what the session holds

    def worth(self, prompt: Sequence[int], on_progress: OnProgress | None) -> NDArray[np.float32]:
        """Return f32[n], what each token of a prompt is worth (raises what Session.evaluate raises)."""
        n, session = len(prompt), self.session
        window = min(WINDOW, n)
        before, self._ids = () if self.is_target else self._ids, ()
        n_past = n_common(before, prompt, min(n - window, session.n_cached))
        ids = np.array(prompt, np.int32)
        if n_past < n - window:
            item = ForwardItem(session, n_past, (RowGroup(ids[n_past : n - window], span=self._span),), _NO_ROWS)
            session.evaluate(item, on_progress)
        weights = np.arange(1, window + 1, dtype=np.float32) / np.float32(window)
        group, mass = RowGroup(ids[n - window :], span=self._span), dict.fromkeys(self._heard, weights)
        forward = session.evaluate(ForwardItem(session, n - window, (group,), _NO_ROWS, mass=mass))
        assert forward.mass is not None, "it was asked for"
        self._ids = () if self.is_target else tuple(prompt)
        worth: NDArray[np.float32] = forward.mass.max(axis=(0, 1))
        return worth


def kept_tokens(worth: NDArray[np.float32], is_frame: NDArray[np.bool_], keep: float) -> NDArray[np.intp]:
    """Return the places of the tokens that are read, ascending: a share of all, at least LEAST where there are so many.

    >>> worth = np.zeros(1000, np.float32); worth[500] = 1
    >>> [int(i) for i in kept_tokens(worth, np.zeros(1000, np.bool_), 0.2)[[95, 96, 127, 128, -1]]]
    [95, 484, 515, 872, 999]
    """
    n = len(worth)
    n_kept = max(math.ceil(keep * n), min(n, LEAST))
    around = np.lib.stride_tricks.sliding_window_view(np.pad(worth, (POOL - 1 - POOL // 2, POOL // 2)), POOL)
    pooled = around.max(axis=1)
    for i in range(FRAME):
        pooled[i:][is_frame[: n - i]] = np.finfo(np.float32).max
    pooled[:FIRST] = pooled[n - LAST :] = np.inf
    return np.sort(np.argsort(-pooled, kind="stable")[:n_kept])


def frame_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> NDArray[np.bool_]:
    """Return bool[n], which tokens of a prompt are control tokens: they are no text, or end one."""
    control = {i for i in set(prompt) if not tokenizer.piece(i) or tokenizer.is_end(i)}
    return np.array([i in control for i in prompt], np.bool_)


class KeptSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session for texts whose prompts are read in part.

    n_past and n_cached count the tokens of the text, those that were left out too.

    Args:
        inner: Holds the tokens that are read.
        reader: Says which those are.
        keep: The share of a prompt that is read.
    """

    what = "a session whose prompts are read in part"
    option = "prompt_keep"

    def __init__(self, inner: Session, reader: Reader, keep: float) -> None:
        super().__init__(inner)
        self._reader, self._keep = reader, keep
        self._n_prompt = 0  # of the text that is being written
        self._chosen: tuple[list[int], NDArray[np.intp]] = [], _NONE  # the latest prompt, and what is read of it
        self._branched: NDArray[np.int32] | None = None  # tokens of the last tree
        self._forget()

    def _forget(self) -> None:
        self._ids: list[int] = []  # the text's tokens, those that were left out too
        self._kept, self._n_cut = _NONE, 0  # which of the first _n_cut tokens the session inside holds

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were read or left out."""
        return len(self._ids)

    @property
    def draft_head(self) -> HeadState | None:
        """The draft head that follows what is read; its n_past counts the text's tokens."""
        head = self.inner.draft_head
        return None if head is None else head.seen_by(place=self._place)

    def _place(self, n_past: int) -> int:
        """Return how many of the text's first `n_past` tokens the session inside holds."""
        if n_past < self._n_cut:
            return int(np.searchsorted(self._kept, n_past))
        return len(self._kept) + n_past - self._n_cut

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return what the session inside says."""
        return self.inner.exact_rows(self._place(n_past), measure)

    def _emptied(self) -> None:
        self._chosen = [], _NONE
        self._forget()

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """Begin a text, whose first `n_prompt` tokens may be read in part."""
        self._n_prompt = n_prompt
        try:
            with self.inner.generating(n_prompt, sampling, seed, stats):
                yield
        finally:
            self._n_prompt = 0
            if stats is not None:
                self._count(stats)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item, whose n_past counts the text's tokens; see Session.forward.

        Raises:
            CapabilityError: Hidden states or pictures were given, or logits of a token that was left out are wanted.
        """
        tokens = tokens_of(item, "a prompt that is read in part", "prompt_keep")
        if not 0 <= item.n_past <= len(self._ids):
            raise SessionError(f"n_past is {item.n_past}; the session has {counted(len(self._ids), 'token')}")
        if item.n_past + len(tokens) > self.n_ctx:
            raise ContextFullError(f"{item.n_past} tokens and {len(tokens)} more are over {self.n_ctx}")
        if item.n_past < self._n_prompt <= item.n_past + len(tokens):
            ids = [*self._ids[: item.n_past], *tokens.tolist()]
            if not item.is_tree:
                return self._end_prompt(item, ids, on_progress)
            self._hold_prompt(ids[: self._n_prompt], item.n_past, on_progress)
        return self._go_on(item, tokens, on_progress)

    def _hold_prompt(self, prompt: list[int], n_past: int, on_progress: OnProgress | None) -> None:
        """Have the session inside hold what is read of a prompt's first tokens, for drafts behind the prompt's end."""
        places = self._choose(prompt, on_progress)
        if not np.array_equal(self._held(n_past), places[places < n_past]):
            self._end_prompt(
                ForwardItem(self, 0, (RowGroup(np.array(prompt, np.int32)),), _NO_ROWS), prompt, on_progress
            )

    def _held(self, n: int) -> NDArray[np.intp]:
        """Return which of the text's first `n` tokens the session inside holds."""
        n = min(n, len(self._ids))
        return np.concatenate([self._kept[self._kept < n], np.arange(self._n_cut, max(n, self._n_cut))])

    def _go_on(self, item: ForwardItem, tokens: NDArray[np.int32], on_progress: OnProgress | None) -> Forward:
        """Evaluate an item behind what the session inside holds of the text."""
        n_past, n_held, n_before = item.n_past, self._place(item.n_past), self.inner.n_cached
        n_new = 0 if item.is_tree else len(tokens)
        try:
            forward = super().evaluate(replace(item, n_past=n_held), on_progress)
        except BaseException:
            if self.inner.n_cached != n_before:
                self._now(n_past, tokens[: max(self.inner.n_cached - n_held, 0)])
            raise
        self._now(n_past, tokens[:n_new])
        self._branched = tokens if item.is_tree else None
        return forward

    def _now(self, n_past: int, tokens: NDArray[np.int32]) -> None:
        """Note tokens that the session inside has read behind the text's first `n_past` tokens."""
        if n_past < self._n_cut:
            self._kept, self._n_cut = self._kept[: self._place(n_past)], n_past
        self._ids[n_past:] = tokens.tolist()
        self._branched = None

    def _end_prompt(self, item: ForwardItem, ids: list[int], on_progress: OnProgress | None) -> Forward:
        """Evaluate an item with the prompt's end; `ids` are the text with all its tokens."""
        n_prompt = self._n_prompt
        chosen = self._choose(ids[:n_prompt], on_progress)
        places = np.concatenate([chosen, np.arange(n_prompt, len(ids))])
        held = [self._ids[i] for i in self._held(len(self._ids))]
        text = [ids[i] for i in places]
        n_same = n_common(held, text, min(len(text) - 1, self.inner.n_cached))
        if (chunk := self.inner.model.capabilities.prefill_chunk) > 1:  # of single steps nothing is as if read at once
            n_same = min(n_same, len(self._kept)) // chunk * chunk
        rows = item.rows
        if not isinstance(rows, str) or rows == "all":
            row_places = item.n_past + item.logit_rows
            if not np.isin(row_places, places[places >= item.n_past]).all():
                raise CapabilityError(
                    f"logits of a token that was left out are wanted; leave {argument('prompt_keep')} out"
                )
            columns = np.searchsorted(places, row_places)
            n_same = min([n_same, *columns[:1].tolist()])
            rows = (columns - n_same).astype(np.int32)
        tokens = np.array(text[n_same:], np.int32)
        try:
            forward = super().evaluate(replace(with_tokens(item, tokens), n_past=n_same, rows=rows), on_progress)
        except BaseException:
            self._forget()
            raise
        self._ids, self._kept, self._n_cut, self._branched = ids, chosen, n_prompt, None
        at = places[n_same:] - item.n_past
        for layer, states in forward.hidden.items():  # a token that was left out has no state
            spread = np.zeros((len(ids) - item.n_past, states.shape[1]), np.float32)
            spread[at[at >= 0]] = states[at >= 0]
            forward = replace(forward, hidden={**forward.hidden, layer: spread})
        return forward

    def _choose(self, prompt: list[int], on_progress: OnProgress | None) -> NDArray[np.intp]:
        """Return the places of the tokens of a prompt that are read."""
        n = len(prompt)
        if prompt == self._chosen[0]:
            return self._chosen[1]
        places = np.arange(n)
        if max(math.ceil(self._keep * n), LEAST) < n:
            if self._reader.is_target:
                self._forget()
            worth = self._reader.worth(prompt, on_progress)
            places = kept_tokens(worth, frame_of(self.model.tokenizer, prompt), self._keep)
        self._chosen = prompt, places
        return places

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        tokens = self._branched
        self.inner.keep(rows)
        if tokens is not None:
            self._ids.extend(tokens[rows].tolist())
        self._branched = None

    def _count(self, stats: DecodeStats) -> None:
        """Add how much of the prompt was read."""
        if not self._reader.is_target:
            stats.explanation.append("drafting off beside a reading model")
        if len(self._kept) == self._n_cut:
            stats.explanation.append(f"prompt read whole: no more than {LEAST} tokens, or all were to be kept")
            return
        card, n_read = self._reader.session.model.card, len(self._kept)
        who = "its first layers" if self._reader.is_target else card.name or card.architecture
        stats.add_note(f"lossy: {n_read} of {counted(self._n_cut, 'prompt token')} were read, chosen by {who}")
        gaps = np.diff(np.concatenate([self._kept, [self._n_cut]])) - 1
        longest, places = int(gaps.argmax()), counted(int((gaps > 0).sum()), "place")
        stats.explanation.append(
            f"prompt read in part: {self._n_cut - n_read} tokens left out at {places}, "
            f"the most {gaps[longest]} behind token {self._kept[longest] + 1}"
        )

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        self._reader.session.cancel()
        self.inner.cancel()

    def close(self) -> None:
        """Free the KV caches; calling it again does nothing."""
        self._reader.session.close()
        self.inner.close()
