"""Documents at the command line: what ranks their passages, and what a person is told of a search."""

from collections.abc import Sequence

from edgedec.progress import CancelToken, OnProgress
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.passages import Passage, by_words
from edgedec_apps.documents.search import Found, Rank


def rank_by_model(name: str | None, load: LoadFlags, output: OutputFlags) -> Rank:
    """Return what ranks passages: by the vectors of the named embedding model, else by words."""
    if name is None:
        return by_words

    def rank(
        passages: Sequence[Passage], question: str, cancel: CancelToken | None, on_progress: OnProgress | None
    ) -> list[int]:
        from edgedec_apps.cli.opening import open_model
        from edgedec_apps.documents.meaning import by_meaning

        flags = LoadFlags(memory=load.memory, threads=load.threads, offline=load.offline, draft="off")
        stop = cancel or CancelToken()
        with open_model(name, flags, OutputFlags(quiet=output.quiet), stop, one_request=True) as embedder:
            return by_meaning(embedder, passages, question, stop, on_progress)

    return rank


def say_found(documents: Sequence[Document], found: Found, n_ctx: int) -> None:
    """Say that documents were searched, and which passages are read."""
    names = one_line(", ".join(document.name for document in documents))
    say(f"edgedec: {found.line(names, n_ctx)}")
