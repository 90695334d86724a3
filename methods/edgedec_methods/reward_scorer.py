"""Process reward model as a scorer: the next token of a second model says whether the text so far is good.

Reward models that answer with a token ("+" or "-") come as any other GGUF.
Reward models with a classifier's head don't: they are refused when they are loaded.

Paper: Math-Shepherd, arXiv:2312.08935
Option: Python only, `RewardScorer`, as the scorer of `BestOf` and of searches
For: who has a reward model
Measured: nothing yet
Status: study
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.model import Session
from edgedec_methods.judgement import Question, chance_yes


class RewardScorer:
    """Implements Scorer by the token logits of a reward model; it owns no session: who opened it closes it."""

    def __init__(
        self,
        session: Session,
        question: Question,
        *,
        prompt_of: Callable[[str, str], str] = lambda prefix, step: f"{prefix}\n{step}",
    ) -> None:
        """Keep a session of the reward model.

        Args:
            session: A session of its own; what it holds is lost.
            question: What is read after a text (the reward model's step mark), and its good and bad token.
            prompt_of: `(prefix, step)` -> what the reward model reads before the question.
        """
        self._session = session
        self._question = question
        self._prompt_of = prompt_of
        self._held: list[int] = []

    def __call__(self, prefix: str, steps: Sequence[str], /) -> Sequence[float]:
        """Return the chance of the good token after each text; what texts have in common is read once.

        Raises:
            RequestError: A text does not fit the reward model's context.
        """
        return [chance_yes(self._logits(self._prompt_of(prefix, step)), self._question) for step in steps]

    def _logits(self, text: str) -> NDArray[np.float32]:
        ids = [*self._session.model.tokenizer.encode(text), *self._question.token_ids]
        if len(ids) > self._session.n_ctx:
            raise RequestError(
                f"the reward model's context holds {self._session.n_ctx} tokens and the text has {len(ids)}; load it "
                "with a longer context"
            )
        n = 0
        while n < min(len(ids) - 1, len(self._held)) and ids[n] == self._held[n]:
            n += 1
        self._held = self._held[:n]
        logits: NDArray[np.float32] = self._session.forward(np.array(ids[n:], np.int32), n_past=n).logits[-1]
        self._held = ids
        return logits
