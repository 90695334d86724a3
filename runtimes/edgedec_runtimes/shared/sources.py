"""Models with an encoder, whatever computes them: the encoder reads a source, and the decoder writes a text behind it.

A session's tokens are the source, the token that every decoder's text begins with, and the text. So a prompt is what it
is for any model, and drafts, forks and prefixes are as well. Tokens of a source are only noted when they come, in
whatever pieces. The encoder reads them together: when one of them ends a text, or else when the decoder begins. In that
forward the keys and values of cross-attention are kept in the slots of the source, and the text's in those behind it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, ModelFormatError, PromptTooLongError, RequestError
from edgedec.model import Forward, RowGroup, Session
from edgedec.progress import OnProgress
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.own_session import OwnSession
from edgedec_runtimes.shared.session_state import CheckedItem

H = TypeVar("H")
S = TypeVar("S", bound=Session)

_NONE = np.empty(0, np.int32)


class SourceSession(OwnSession):
    """The part of a session that notes a source.

    Attributes:
        source: int32, the tokens of the source that were noted.
        n_encoded: How many tokens the encoder has read: all of the source, or 0.
    """

    source: NDArray[np.int32] = _NONE
    n_encoded = 0

    def hold_source(self, source: NDArray[np.int32], n_encoded: int) -> None:
        """Hold a source, of which the encoder has read `n_encoded` tokens."""
        self.source, self.n_encoded = source, n_encoded

    def is_behind(self, n_past: int, token: int, start: int) -> bool:
        """Return whether rows from `n_past` on, the first one of `token`, are the decoder's, and it can read them."""
        n = len(self.source)
        return 0 < n == self.n_encoded and (n_past > n or (n_past == n and token == start))

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Return how many tokens of a prompt are read; a part of a source is of no use: the encoder reads it whole."""
        return n_held if 0 < len(self.source) == self.n_encoded <= n_held else 0

    def _fork(self) -> Any:
        """Return a second session; before the encoder has read, there is nothing to share."""
        n = self.n_cached
        twin = super()._fork() if 0 < self.n_encoded <= n else self._model.session(self.n_ctx)
        assert isinstance(twin, SourceSession), "a session's fork is of its class"
        twin.hold_source(self.source[:n], self.n_encoded if self.n_encoded <= n else 0)
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        """Return the source in front of what the decoder needs, which is nothing as long as there is no text.

        Tokens behind the source are written as -1, so that what is restored knows where the decoder begins.
        """
        source = np.full(n, -1, np.int32)
        source[: len(self.source)] = self.source[:n]
        if n > len(self.source):
            return source, *super()._arrays(n)
        return source, *(np.zeros(shape, dtype) for dtype, shape in super()._layout(n))

    def _layout(self, n: int) -> Sequence[tuple[Any, tuple[int, ...]]]:
        return (np.int32, (n,)), *super()._layout(n)

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Any:
        card, padded = self._model.card, arrays[0]
        n_source = int((padded >= 0).sum())
        if (padded[:n_source] < 0).any() or (padded >= card.n_vocab).any() or (n and not n_source):
            raise ModelFormatError("the saved state has no source in front of its text; evaluate the tokens again")
        self.hold_source(padded[:n_source].copy(), n_source if n > n_source else 0)
        all_layers = np.ones((card.n_layer, n), np.bool_)
        return all_layers & super()._take(arrays[1:], n) if n > n_source else all_layers


class SourceModel(LibraryModel[H, S]):
    """The part of a model that has its encoder read sources."""

    @cached_property
    def _n_source(self) -> int:
        """Most tokens that the encoder reads."""
        return self.card.n_ctx_train // 2

    @cached_property
    def start(self) -> int:
        """The decoder's start token, with which each encoded prompt ends."""
        return self.tokenizer.encode("")[-1]

    def _evaluate(self, checked: list[CheckedItem], on_progress: OnProgress | None) -> list[Forward]:
        """Note the rows of sources, have the encoder read those that are whole, and evaluate the rows behind them."""
        n_sources = [self._n_of_source(item) for item in checked]  # all may refuse before anything is noted
        behind = [self._read(item, n) for item, n in zip(checked, n_sources, strict=True)]
        rows = [item for item in behind if item is not None]
        forwards = iter(super()._evaluate(rows, on_progress) if rows else ())
        n_rows = [len(item.logit_rows) for item in checked]
        zeros = np.zeros((max(n_rows), self.card.n_vocab), np.float32)  # as nothing follows from a source alone
        each = zip(n_rows, behind, strict=True)
        return [Forward(zeros[:n], best=[0] * n) if rest is None else next(forwards) for n, rest in each]

    def _n_of_source(self, item: CheckedItem) -> int:
        """Return how many rows of an item, from its first one on, are of a source.

        Raises:
            PromptTooLongError: The encoder does not read so many tokens.
            RequestError, CapabilityError: They are a tree, or there is none in front of the text, or a row's logits
                are wanted that has none.
        """
        session, tokens = item.session, item.groups[0].tokens
        assert tokens is not None, "these models take no vectors"
        if session.is_behind(item.n_past, int(tokens[0]), self.start):
            return 0
        starts = np.flatnonzero(tokens == self.start)
        n = int(starts[0]) if len(starts) else item.n_rows
        if (n_source := item.n_past + n) > self._n_source:
            error = PromptTooLongError(
                f"the prompt takes {n_source} tokens or more; the encoder of this model reads {self._n_source} at "
                "most. Shorten it, or take a model without an encoder"
            )
            error.n_tokens, error.n_most = n_source, self._n_source
            raise error
        if not n_source or (n and item.parents is not None):
            raise RequestError("a text begins behind a prompt of at least one token, which the encoder reads whole")
        if (item.logit_rows < n).any() and (n < item.n_rows or len(item.logit_rows) > 1):
            raise CapabilityError(
                "this model's encoder reads the prompt, whose tokens have no probabilities: ask for those of the text"
            )
        return n

    def _read(self, item: CheckedItem, n: int) -> CheckedItem | None:
        """Note the first `n` rows of an item, those of a source; return what is left of it, None for nothing.

        What the encoder has read stands as long as its tokens do: where one of them is read anew, it reads all again.
        It does so when the source ends as every text does, so that its time is the prompt's and not the first step's.
        A source that does not end so is read when the decoder begins.
        """
        session, tokens, n_past = item.session, item.groups[0].tokens, item.n_past
        assert tokens is not None, "these models take no vectors"
        if n == 0 and session.is_behind(n_past, int(tokens[0]), self.start):
            return item
        begins = n < item.n_rows
        if n:
            source = np.concatenate([session.source[:n_past], tokens[:n]])
            session.hold_source(source, 0)
            session.state.begin(CheckedItem(session, n_past, (RowGroup(source[n_past:]),), n, None, _NONE))
            session.state.advance(n)
        elif n_past < len(session.source):
            session.hold_source(session.source[:n_past], 0)
        if not session.n_encoded and (begins or self.tokenizer.is_end(int(session.source[-1]))):
            self._encode(session)
            session.n_encoded = len(session.source)
        if not begins:
            return None
        rest = RowGroup(tokens[n:], sees=item.groups[0].sees)
        return CheckedItem(session, n_past + n, (rest,), item.n_rows - n, item.parents, item.logit_rows - n)

    @abstractmethod
    def _encode(self, session: Any) -> None:
        """Run the encoder over a session's source, and keep the keys and values that cross-attention reads.

        It is a forward of its own, without logits. Where it is cancelled, the source stays noted, and the next forward
        begins with it again.
        """
