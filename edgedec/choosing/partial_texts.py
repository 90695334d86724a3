"""The prompt that choosers and searches are asked about, and its texts while a search writes them side by side.

Every search moves texts through `PartialTexts`, so that one place counts what a search costs, looks at the
cancel token, and frees the branches when the search ends, however it ends.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.chat import Message
from edgedec.closeable import Closeable
from edgedec.decoding.branches import Branches
from edgedec.model import Model
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.sampling import log_probs

Ended = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class PartialText:
    """A text in the middle of its writing, or at its end.

    Attributes:
        branch: The branch that holds it.
        token_ids: The tokens after the prompt, without an end token.
        logprob: The sum of the model's log-probabilities of these tokens, and of the end token where it has one.
        logits: f32[n_vocab], the logits that follow the last token of `token_ids`.
        ended: "stop" after an end token or a stop string, "length" at the most tokens allowed, None while it goes on.
        n_scored: How many tokens `logprob` sums over.
        end_logprob: The end token's part of `logprob`; 0 without one.
    """

    branch: int
    token_ids: tuple[int, ...]
    logprob: float
    logits: NDArray[np.float32]
    ended: Ended | None = None
    n_scored: int = 0
    end_logprob: float = 0.0

    @property
    def mean_logprob(self) -> float:
        """The mean of the log-probabilities; 0 for an empty text."""
        return self.logprob / max(1, self.n_scored)


class PartialTexts(Closeable):
    """The texts of one prompt that a search holds; a context manager, which drops them all at its end.

    Attributes:
        decode: `(token_ids)` -> text.
        cancel: Ends the search with CancelledError before its next forward; None where nobody can cancel.
        forwards: How many forwards were made so far, by their rows; look-aheads and judgements are among them.
    """

    def __init__(
        self,
        branches: Branches,
        prompt_ids: Sequence[int],
        *,
        is_end: Callable[[int], bool],
        decode: Callable[[Sequence[int]], str],
        max_tokens: int,
        stop: Sequence[str] = (),
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Hold the branches of a prompt, of which only the root is open.

        Args:
            branches: They have read the prompt; who opened them closes them.
            is_end: `(token_id)` -> whether the token ends a text.
            max_tokens: Most tokens of a text after the prompt.
            stop: Strings, each of which ends a text.
            on_progress: Called with the number of tokens evaluated so far, after each forward.
        """
        self.prompt_ids = tuple(prompt_ids)
        self.decode = decode
        self.cancel = cancel
        self.forwards: Counter[int] = Counter()
        self._branches = branches
        self._on_progress = on_progress
        self._is_end = is_end
        self._max_tokens = max_tokens
        self._stop = tuple(stop)
        self._n_tail = max((len(string.encode()) for string in self._stop), default=0)

    def begin(self) -> PartialText:
        """Return the empty text; call it once."""
        return PartialText(self._branches.root, (), 0.0, np.array(self._branches.logits, np.float32))

    @property
    def n_tokens(self) -> int:
        """Tokens evaluated so far, those of look-aheads and judgements included."""
        return sum(n_rows * count for n_rows, count in self.forwards.items())

    def text(self, text: PartialText) -> str:
        """Return what a text says, without the stop string that ended it."""
        whole = self.decode(text.token_ids)
        if text.ended == "stop":
            places = [place for string in self._stop if (place := whole.find(string)) >= 0]
            whole = whole[: min(places, default=len(whole))]
        return whole

    def fork(self, text: PartialText) -> PartialText:
        """Return a second text that says the same and goes its own way."""
        (branch,) = self._branches.fork(text.branch)
        return replace(text, branch=branch)

    def drop(self, *texts: PartialText) -> None:
        """Free texts; one that is dropped already stays so."""
        for text in texts:
            if text.branch in self._branches.names:
                self._branches.drop(text.branch)

    def advance(self, choices: Sequence[tuple[PartialText, int]]) -> list[PartialText]:
        """Return each text with its next token, in the order of the choices, after one forward for all.

        A text that is chosen several times is forked. The texts that were chosen are used up; texts that were not
        chosen stay as they are.
        """
        owners: set[int] = set()
        grown = list[tuple[PartialText, int]]()
        for text, token_id in choices:
            grown.append((self.fork(text) if text.branch in owners else text, token_id))
            owners.add(text.branch)
        goes_on = [not self._is_end(token_id) for _, token_id in grown]
        rows = {text.branch: [token_id] for (text, token_id), on in zip(grown, goes_on, strict=True) if on}
        logits = self._forward(rows)
        return [self._with(text, token_id, logits.get(text.branch)) for text, token_id in grown]

    def extend(self, text: PartialText, token_ids: Sequence[int], logprob: float) -> PartialText:
        """Return a text with several tokens more, read in one forward; `logprob` is the sum of theirs.

        None of the tokens may end the text.
        """
        if not token_ids:
            return text
        logits = self._forward({text.branch: token_ids})[text.branch]
        n = len(token_ids)
        ids = (*text.token_ids, *map(int, token_ids))
        return self._cut(PartialText(text.branch, ids, text.logprob + logprob, logits, n_scored=text.n_scored + n))

    def peek(self, texts: Sequence[PartialText], token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return f32[n_vocab] for each text: the logits after it and further tokens, which it does not keep."""
        forks = [self.fork(text) for text in texts]
        try:
            logits = self._forward({fork.branch: token_ids for fork in forks})
        finally:
            self.drop(*forks)
        return [logits[fork.branch] for fork in forks]

    def close(self) -> None:
        """Free every text that is left; calling it again does nothing."""
        for branch in self._branches.names:
            self._branches.drop(branch)

    def _forward(self, rows: Mapping[int, Sequence[int]]) -> dict[int, NDArray[np.float32]]:
        """Evaluate rows, and return logits that stay valid."""
        check_cancelled(self.cancel, "the search")
        if not rows:
            return {}
        self.forwards[sum(map(len, rows.values()))] += 1
        forwards = self._branches.forward(rows)
        report_progress(self._on_progress, "searching", self.n_tokens, None, "tokens")
        return {branch: logits[-1] for branch, logits in forwards.items()}

    def _with(self, text: PartialText, token_id: int, logits: NDArray[np.float32] | None) -> PartialText:
        """Return a text with a token more; without new logits the token ends the text and is no part of it."""
        last = float(log_probs(text.logits, np.array([token_id]))[0])
        logprob, n_scored = text.logprob + last, text.n_scored + 1
        if logits is None:
            return replace(text, logprob=logprob, n_scored=n_scored, end_logprob=last, ended="stop")
        ids = (*text.token_ids, token_id)
        return self._cut(PartialText(text.branch, ids, logprob, logits, n_scored=n_scored))

    def _cut(self, text: PartialText) -> PartialText:
        """Return a text that is at its end where it holds a stop string or has the most tokens allowed."""
        if self._stop:
            tail = self.decode(text.token_ids[-self._n_tail - 1 :])
            if any(string in tail for string in self._stop):
                return replace(text, ended="stop")
        return replace(text, ended="length") if len(text.token_ids) >= self._max_tokens else text


def row_log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return f64[n_vocab], the model's log-probabilities of every next token."""
    return log_probs(logits, np.arange(len(logits)))


def best_tokens(row: NDArray[Any], n: int) -> list[int]:
    """Return the n tokens with the greatest values of f[n_vocab], the greatest first, the lower id first on a tie."""
    n = min(n, len(row))
    border = np.partition(row, len(row) - n)[len(row) - n]
    ids = np.flatnonzero(row >= border)
    return [int(ids[i]) for i in np.argsort(-row[ids], kind="stable")][:n]


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt whose texts are chosen among or searched for.

    Attributes:
        model: The runtime's model.
        token_ids: The prompt.
        prefix: The prompt as text, for the caller's scorer: of a chat its last message, of token ids nothing.
        open_branches: `(most)` -> opens at most so many branches of the prompt inside the block.
        render: `(messages)` -> the prompt that the model's chat template makes of them, as text; None where the prompt
            is no chat.
        cancel: Stops the writing, the search and the scorer; None where nobody can cancel.
    """

    model: Model
    token_ids: Sequence[int]
    prefix: str
    open_branches: Callable[[int], AbstractContextManager[Branches]]
    render: Callable[[Sequence[Message]], str] | None
    cancel: CancelToken | None
