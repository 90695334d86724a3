"""The contract of a resolver: from what a user types (a catalogue name, hf:owner/repo, ollama:name) to a file on disk.

Resolvers are plug-ins (entry point group `edgedec.resolvers`); edgedec's own is in edgedec_models. An existing path is
used as it is, without a resolver.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgedec.progress import CancelToken, OnProgress


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """How a resolver may look a model up and fetch it.

    Attributes:
        cache_dir: Root of edgedec's cache; None for the platform's default.
        offline: Never touch the network; raise OfflineError where it would be needed.
        on_progress: Called with the progress of downloads, from the calling thread.
        cancel: Stops a download; the part that was fetched is kept for resuming.
        draft_head: The name is a trained draft head's: a repository may hold config.json and safetensors instead of a
            GGUF, and the file returned is then config.json.
    """

    cache_dir: Path | None = None
    offline: bool = False
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None
    draft_head: bool = False


class Resolver(Protocol):
    """Turns a model name into the path of a local file, and fetches the file where that is allowed."""

    def __call__(self, name: str, options: ResolveOptions) -> Path | None:
        """Return the file of `name`, or None where the name is of no kind that this resolver knows.

        Raises:
            ModelNotFoundError: The name is of this resolver's kind, but there is no model of that name.
            PullError, OfflineError, StorageError, CancelledError: Fetching the file failed.
        """
