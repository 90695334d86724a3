"""From what a user types (a path, a catalogue name, hf:owner/repo, ollama:name) to a file on disk.

Resolvers are plug-ins (entry point group `edgedec.resolvers`); ours lives in edgedec_models. An existing path
always wins and needs no resolver.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgedec.progress import CancelToken, OnProgress


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """How a model may be looked up and fetched.

    Attributes:
        cache_dir: Root of edgedec's cache; None for the platform's default.
        offline: Never touch the network; raise OfflineError where it would be needed.
        on_progress: Called with the progress of downloads; from the calling thread.
        cancel: Stops a download; what was fetched so far is kept for resuming.
    """

    cache_dir: Path | None = None
    offline: bool = False
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None


class Resolver(Protocol):
    """Turn a model name into the path of a local file, fetching it where allowed."""

    def __call__(self, name: str, options: ResolveOptions) -> Path | None:
        """Return the file for `name`, or None when the name is not of a kind this resolver knows.

        Raises:
            ModelNotFoundError: The name is of this resolver's kind, but nothing answers to it.
            PullError, OfflineError, StorageError, CancelledError: Fetching it failed.
        """
