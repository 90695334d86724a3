"""The error for a model of which nothing can be known before all of it is downloaded."""

from edgedec.errors import PullError
from edgedec_models.storage import human_bytes


class NeedsDownloadError(PullError):
    """A model's header can't be had without the whole model; `n_bytes` is how much that is, or None."""

    def __init__(self, name: str, reason: str, n_bytes: int | None) -> None:
        """Say what would have to be downloaded, and the command for it."""
        size = "" if n_bytes is None else f" ({human_bytes(n_bytes)})"
        super().__init__(f"{reason}, so all of {name}{size} is needed; download it with: edgedec pull {name}")
        self.n_bytes = n_bytes
