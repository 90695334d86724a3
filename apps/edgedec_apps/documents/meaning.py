"""Ranks passages by what they mean: by the vectors of an embedding model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec_apps.documents.passages import Passage
from edgedec_apps.embedding import embed

if TYPE_CHECKING:
    from edgedec.api.engine import Engine

_AT_ONCE = 16  # passages between two reports


def by_meaning(
    embedder: "Engine",
    passages: Sequence[Passage],
    question: str,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> list[int]:
    """Return the indices of passages, the one first whose vector is the most similar to that of the question.

    Texts are cut to the context of the embedding model (raises what embed raises).
    """
    wanted = embed(embedder, [embedder.cut_ids(question)], cancel=cancel)[0]
    scores: list[float] = []
    for begin in range(0, len(passages), _AT_ONCE):
        report_progress(on_progress, "embedding", begin, len(passages), "passages")
        ids = [embedder.cut_ids(passage.text) for passage in passages[begin : begin + _AT_ONCE]]
        scores += (embed(embedder, ids, cancel=cancel) @ wanted).tolist()
    report_progress(on_progress, "embedding", len(passages), len(passages), "passages")
    return sorted(range(len(scores)), key=lambda i: -scores[i])
