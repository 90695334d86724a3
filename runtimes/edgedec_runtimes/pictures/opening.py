"""How a projector file is opened."""

from dataclasses import dataclass

from edgedec_runtimes.pictures.header import DYNAMIC, ProjectorHeader

DYNAMIC_TOKENS = 1024
"""Most rows of a picture of the kinds that make more rows of a larger one, unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an encoder is opened.

    Attributes:
        header: The projector file's facts.
        architecture: The text model's architecture, which decides how rows are placed.
        n_threads: Threads that encode.
        max_tokens: Most rows of a picture, where the kind has such a limit; None for the file's own.
    """

    header: ProjectorHeader
    architecture: str
    n_threads: int
    max_tokens: int | None


def opening(header: ProjectorHeader, architecture: str, n_threads: int, max_tokens: int | None) -> Opening:
    """Return how a projector is opened, with the default of `max_tokens` filled in."""
    if max_tokens is None and header.projector_type in DYNAMIC:
        max_tokens = DYNAMIC_TOKENS
    return Opening(header, architecture, n_threads, max_tokens)
