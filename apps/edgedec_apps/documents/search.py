"""Prompts about documents: whole where they fit the context, else the passages that match the question best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.api.engine import Engine
from edgedec.errors import counted
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.passages import Passage, by_words, passages_of
from edgedec_apps.embedding import embed

_MOST, _LEAST = 1200, 80  # characters of a passage
_AT_ONCE = 6  # passages of the most characters should fit, at three characters a token
_EMBEDDED_AT_ONCE = 16  # passages between two reports
_TOKEN_CHARACTERS = 3
_SHOWN = 160  # characters of a passage

Rank = Callable[[Sequence[Passage], str, CancelToken | None, OnProgress | None], list[int]]
"""Returns the indices of passages that are worth reading for a question, the best first."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is read of documents that are longer than the context.

    Attributes:
        content: The content of the message: the passages in the documents' order, each below its place, then the
            question.
        passages: The passages; neighbours are one.
        n_read: How many passages that were searched these are.
        n_searched: How many passages the documents have.
    """

    content: str
    passages: tuple[Passage, ...]
    n_read: int
    n_searched: int

    def line(self, name: str, n_ctx: int) -> str:
        """Return a sentence for a person; `name` stands for the documents."""
        places = "; ".join(_places(self.passages))
        return (
            f"{name}: longer than the context of {n_ctx} tokens, so it was searched for the question; read: "
            f"{self.n_read} of {counted(self.n_searched, 'passage')} ({places})"
        )

    def lines(self) -> list[str]:
        """Return a line for each passage that is read, with its place and its beginning."""
        return [f"read: {each.name}, {each.place}: {each.text.strip()[:_SHOWN]}" for each in self.passages]

    def document(self) -> dict[str, Any]:
        """Return the JSON object of what is read."""
        read = [{"document": each.name, "place": each.place, "text": each.text.strip()} for each in self.passages]
        return {"n_passages": self.n_searched, "n_read": self.n_read, "passages": read}


def whole(documents: Sequence[Document], question: str | None, *, with_names: bool) -> str:
    """Return documents and a question as the content of a message; each document may stand below its name.

    The question comes last, so that another one about the same documents finds them in the KV cache.
    """
    texts = [f"File {each.name}:\n\n{each.whole.rstrip()}" if with_names else each.whole for each in documents]
    return "\n\n".join(texts if question is None else [*(text for text in texts if text.strip()), question])


def search(
    documents: Sequence[Document],
    question: str,
    n_room: int,
    fits: Callable[[str], bool],
    *,
    rank: Rank = by_words,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> Found | None:
    """Return as many of the best passages as fit, for one question; the same ones for the same arguments.

    Args:
        question: What is asked about them.
        n_room: Tokens that the message may have, roughly; it decides how long a passage is.
        fits: Whether a message with this content fits the context.
        rank: Ranks the passages.
        cancel: Stops the search.
        on_progress: Takes the progress.

    Returns:
        What was found; None where no passage matches, or none fits.

    Raises:
        CancelledError: `cancel` was cancelled.
    """
    most = max(_LEAST, min(_MOST, n_room * _TOKEN_CHARACTERS // _AT_ONCE))
    passages = passages_of(documents, most)
    ranked = rank(passages, question, cancel, on_progress)

    def of(n: int) -> Found:
        read = _joined(passages, sorted(ranked[:n]))
        texts = [f"[{each.name}, {each.place}]\n{each.text.strip()}" for each in read]
        return Found("\n\n".join([*texts, question]), tuple(read), n, len(passages))

    n = _most(len(ranked), lambda n: fits(of(n).content))
    return of(n) if n else None


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `n` that fits, where all smaller ones do: by doubling, then halving steps."""
    low, step = 0, 1
    while low + step <= n and fits(low + step):
        low, step = low + step, 2 * step
    while step := step // 2:
        if low + step <= n and fits(low + step):
            low += step
    return low


def _joined(passages: Sequence[Passage], chosen: Sequence[int]) -> list[Passage]:
    """Return the chosen passages, by their indices in order; neighbours in a document become one."""
    joined: list[Passage] = []
    for before, i in zip([-2, *chosen], chosen, strict=False):
        here = passages[i]
        if i == before + 1 and joined[-1].document == here.document:
            last = joined.pop()
            gap = "\n\n" if here.is_paged and here.first != last.last else ""
            text = f"{last.text}{gap}{here.text}"
            here = Passage(here.document, here.name, text, last.first, here.last, here.is_paged)
        joined.append(here)
    return joined


def _places(passages: Sequence[Passage]) -> list[str]:
    """Return the places of passages, by document."""
    by_place: dict[tuple[int, str], list[str]] = {}
    for each in passages:
        by_place.setdefault((each.document, each.name), []).append(each.place)
    return [
        ", ".join(places) if len(by_place) == 1 else f"{name}: {', '.join(places)}"
        for (_, name), places in by_place.items()
    ]


def by_meaning(
    embedder: Engine,
    passages: Sequence[Passage],
    question: str,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> list[int]:
    """Return the indices of passages, the one first whose vector is the most similar to that of the question.

    Texts are cut to the context of the embedding model (raises what embed raises).
    """
    query = embed(embedder, [embedder.requests.cut_ids(question)], cancel=cancel)[0]
    scores: list[float] = []
    for begin in range(0, len(passages), _EMBEDDED_AT_ONCE):
        report_progress(on_progress, "embedding", begin, len(passages), "passages")
        ids = [embedder.requests.cut_ids(passage.text) for passage in passages[begin : begin + _EMBEDDED_AT_ONCE]]
        scores += (embed(embedder, ids, cancel=cancel) @ query).tolist()
    report_progress(on_progress, "embedding", len(passages), len(passages), "passages")
    return sorted(range(len(scores)), key=lambda i: -scores[i])
