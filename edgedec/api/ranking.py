"""Ranking: how well documents match a query, by a model that was trained to judge that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from edgedec import plugins
from edgedec.api.loaded_model import LoadedModel
from edgedec.callers import checks_methods, one_line
from edgedec.progress import CancelToken, OnProgress


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well documents match a query.

    Attributes:
        scores: By document, in the order given; the higher, the better it matches.
        kind: "logit" of a cross-encoder's head, any number; "probability" that a model answers yes.
        n_tokens: By document, the tokens that its score was computed from, those of the query included.
        notes: Sentences on what the scores are worth.
        total_s: Seconds of everything.
    """

    scores: tuple[float, ...]
    kind: Literal["logit", "probability"]
    n_tokens: tuple[int, ...]
    notes: tuple[str, ...]
    total_s: float

    __repr__ = one_line

    @property
    def order(self) -> list[int]:
        """The documents' indices, the best match first; of equals the first one first."""
        return sorted(range(len(self.scores)), key=lambda i: -self.scores[i])

    @property
    def normalized(self) -> tuple[float, ...]:
        """The scores as numbers from 0 to 1: the sigmoid of a logit, and a probability as it is."""
        if self.kind == "probability":
            return self.scores
        return tuple(map(sigmoid, self.scores))

    def best(self, most: int | None, *, normalize: bool) -> tuple[list[tuple[int, float]], str]:
        """Return the best documents (all where `most` is None), each with its score, and what kind the scores are."""
        scores = self.normalized if normalize else self.scores
        kind = "normalized logit" if normalize and self.kind == "logit" else self.kind
        return [(i, scores[i]) for i in self.order[:most]], kind


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), which keeps small numbers apart."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(max(x, -745.0)) / (1 + math.exp(max(x, -745.0)))


@checks_methods
class RankingModel(LoadedModel):
    """A loaded model that ranks documents."""

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_document_tokens: int | None = None,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> Ranking:
        """Return how well each document matches a query; a document's score depends on the query and on it alone.

        Args:
            query: The question or the words to look for.
            documents: The texts.
            max_document_tokens: Cut documents to so many tokens, and to what fits the context; None for no cut.
            cancel: Stops the work, from any thread.
            on_progress: Called with the number of documents that were scored.

        Raises:
            RequestError: The query is empty, there is no document, or an argument has the wrong type or range.
            PromptTooLongError: The query, or a document that may not be cut, does not fit the context.
            CapabilityError: The model has neither a head for ranking nor a form of prompt that asks for yes or no.
            CancelledError: `cancel` stopped the work.
        """
        task = plugins.load_plugin(plugins.OWN, "rank")
        options = {"max_document_tokens": max_document_tokens, "cancel": cancel, "on_progress": on_progress}
        return cast(Ranking, task(self, self._path, query, documents, **options))

    async def arank(self, query: str, documents: Sequence[str], *, max_document_tokens: int | None = None) -> Ranking:
        """Rank without blocking the event loop; cancelling the task stops the work."""
        from edgedec.api.async_api import in_thread

        return await in_thread(
            lambda cancel: self.rank(query, documents, max_document_tokens=max_document_tokens, cancel=cancel)
        )
