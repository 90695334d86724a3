"""Universal assisted generation: a draft model with another tokenizer drafts by way of the text.

The target's tokens become bytes, and the bytes become tokens of the draft model (edgedec_methods.alignment). What the
draft model drafts goes the other way (string-level exact match, SLEM, in that paper) and is verified as any draft is.
The last token of the drafted text may be the beginning of a longer one. So it is left out, unless it is one token for
both models (the vocabularies' intersection, TLI, in that paper): then the draft model itself says that the token ends
there.

The two models share no noise. So the draft is greedy at every temperature, and p_accept is the draft model's
probability at that temperature, an estimate of how often the target draws the same. The draft has no q under the opt-in
rules either: many drafts of text spell one token of the target, so the distribution that the token would be drawn from
is not known.

Paper: Timor et al. 2025, arXiv:2502.05202
Option: `--draft model --draft-option model=MODEL`, a model with another tokenizer
For: a target that has no smaller model of its family
Measured: nothing yet (`edgedec bench MODEL --draft model --draft-option model=OTHER` tells)
Status: opt-in
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafter_traits import DraftCost, DrafterTraits
from edgedec.drafters.draft_model.draft_text import window_of
from edgedec.drafters.draft_model.model import DraftModel, DraftModelUser
from edgedec.errors import UnsupportedModelError
from edgedec.loading.second_model import PROBE, LoadedDraft
from edgedec.model import Forward, Model
from edgedec.sampling import SamplingParams, distribution
from edgedec.tokenizer import added_around
from edgedec_methods.alignment import Aligned, continuation, encode_aligned, whole_characters

_BEFORE = 8  # tokens of the target before the drafted text that it is encoded together with
_STEPS = 4  # most forwards of the draft model for one token of the target


def universal(loaded: LoadedDraft) -> "UniversalDraftModel | None":
    """Return the factory of drafters around a draft model with another tokenizer; None for one with the target's.

    Raises:
        UnsupportedModelError: A tokenizer does not turn a text into tokens that spell the same text.
    """
    if loaded.same_tokenizer or loaded.overlap:
        return None
    for model in (loaded.model, loaded.target):
        if encode_aligned(model.tokenizer, PROBE.encode()) is None:
            name = model.card.name or model.card.architecture
            raise UnsupportedModelError(
                f"{loaded.path}: its tokenizer is not the target's, and the tokenizer of {name!r} does not encode a "
                "text as tokens that spell the same text, which guesses across tokenizers need; choose a draft model "
                "of the target's family"
            )
    return UniversalDraftModel(loaded.model, loaded.most)


class UniversalDraftModel(DraftModelUser):
    """A loaded draft model with another tokenizer; makes the drafter of each generation (an
    edgedec.drafter.ModelFactory).

    Attributes:
        source: The draft model with its session.
        first: Tokens that the draft model expects before every text.
    """

    def __init__(self, model: Model, most: int | None = None) -> None:
        self.first = added_around(model.tokenizer)[0]
        super().__init__(DraftModel(model, most))

    def __call__(self, context: DraftContext) -> "UniversalDrafter":
        """Make the drafter of one generation."""
        return UniversalDrafter(self, context)


class UniversalDrafter:
    """Implements edgedec.drafter.Drafter.

    Attributes:
        calls: The forwards for the latest draft, each with what it was joined into.
        own_s: Seconds of this thread that the latest draft took beside these forwards.
        traits: What the drafter declares.
    """

    needs = DrafterNeeds()

    def __init__(self, drafts: UniversalDraftModel, context: DraftContext) -> None:
        self.calls: Sequence[SharedForward] = ()
        self.own_s = 0.0
        self._source = drafts.source
        self._context = context
        self._first = drafts.first
        self._target = context.target.model.tokenizer
        self._n_vocab = context.target.model.card.n_vocab
        params = context.sampling
        self._params = replace(  # without what names or counts tokens of the target
            params, logit_bias={}, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, momentum=0.0
        )
        self._floor = context.floor
        self.traits = DrafterTraits(DraftCost.MODEL, level_s=drafts.source.token_s, about=drafts.source.summary)
        self.begin([])

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which is encoded and read when the first draft is requested."""
        self._text = Aligned(self._source.model.tokenizer)
        self._new = bytearray()  # bytes that were not added to the text yet
        self._before: list[int] = []
        self._window: int | None = None
        self._take(token_ids)

    def _take(self, token_ids: Sequence[int]) -> None:
        """Take tokens of the target."""
        self._new += b"".join(map(self._target.piece, token_ids))
        self._before = [*self._before, *token_ids[-_BEFORE:]][-_BEFORE:]

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Draft text greedily while that pays, and return the target's tokens in it."""
        begun = perf_counter()
        self._text.add(bytes(self._new))
        self._new.clear()
        ids = [*self._first, *self._text.ids]
        if not ids or not self._text.complete or n_max < 1:
            return EMPTY_DRAFT
        n_steps = min(n_max * _STEPS, self._source.n_ctx // 4)
        lent = self._source.lend(self, ids, self._context)
        lent.begin_draft()
        if self._window is None or self._window >= len(ids):  # the text may begin later than it did
            self._window = lent.first_begin(ids)
        self._window = lent.next_begin(self._window, len(ids), n_steps)
        forward = self._source.read(lent, window_of(ids, self._window))
        pieces: list[bytes] = []
        p: list[float] = []
        path, draft = 1.0, EMPTY_DRAFT
        tokenizer = self._source.model.tokenizer
        while True:
            token, chance = most_probable(forward, self._params)
            if tokenizer.is_end(token):
                draft = self._translated(pieces, p, ended=True)
                break
            piece = tokenizer.piece(token) if token < tokenizer.n_vocab else b""
            if not piece:
                break
            pieces.append(piece)
            p.append(chance)
            path *= chance
            draft = self._translated(pieces, p, ended=False)
            if len(draft) >= n_max or len(pieces) >= n_steps:
                break
            if path < self._floor.path_probability or monotonic() > deadline_s:
                break
            forward = self._source.read(lent, [*lent.cached, token])
        self.calls, self.own_s = lent.calls, perf_counter() - begun - lent.called_s
        return draft.truncated(n_max)

    def _translated(self, pieces: Sequence[bytes], p: Sequence[float], *, ended: bool) -> Draft:
        """Return drafted text as a chain of the target's tokens.

        Args:
            pieces: The bytes of each drafted token.
            p: The probability of each; a token of the target has the product of those that begin in it.
            ended: Whether the draft model ended its text there, so that the last token can't be longer.
        """
        data = b"".join(pieces)
        translated = continuation(self._target, self._before, data[: whole_characters(data)])
        if translated is None:
            return EMPTY_DRAFT
        ends = [0, *translated.ends]
        n = len(translated.ids)
        if n and not ended and ends[n - 1 :] != [len(data) - len(pieces[-1]), len(data)]:
            n -= 1
        n = next((i for i in range(n) if translated.ids[i] >= self._n_vocab), n)
        p_accept = [1.0] * n
        begin = 0
        for piece, chance in zip(pieces, p, strict=True):
            i = bisect_left(translated.ends, begin + 1)
            if i < n:
                p_accept[i] *= chance
            begin += len(piece)
        return Draft.tree(translated.ids[:n], range(-1, n - 1), p_accept)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self._take(verification.token_ids)

    def close(self) -> None:
        """Give the draft model's session back; calling close() again does nothing."""
        self._source.give_back(self)

    def memory_bytes(self) -> int:
        """Return the bytes of the text and its tokens; the draft model has its own terms in the memory plan."""
        return len(self._new) + len(self._text.text) + 2 * 16 * len(self._text.ids)


def most_probable(forward: Forward, params: SamplingParams) -> tuple[int, float]:
    """Return the most probable token after a forward's only row, and its probability under these options."""
    logits, ops = forward.logits[0], forward.ops
    if params.greedy:
        token, total = ops.argmax(logits), ops.total(logits)
        return token, float(np.exp(float(logits[token]) - total.most)) / total.weight
    dist = distribution(logits, params, (), ops)
    best = int(dist.probs.argmax())
    return int(dist.token_ids[best]), float(dist.probs[best])
