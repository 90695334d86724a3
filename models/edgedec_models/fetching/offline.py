"""Whether the network may be used, and the error for what needs it."""

import os

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions


def offline_reason(options: ResolveOptions) -> str | None:
    """Return why the network may not be used, for a message; None where it may be used."""
    if options.offline:
        return "the option offline is set"
    for variable in ("EDGEDEC_OFFLINE", "HF_HUB_OFFLINE"):
        if os.environ.get(variable, "").lower() not in {"", "0", "false", "no", "off"}:
            return f"{variable} is set"
    return None


class NeedsDownloadError(PullError):
    """A model's header can't be had without the whole model; `n_bytes` is how much that is, or None."""

    def __init__(self, name: str, reason: str, n_bytes: int | None) -> None:
        """Say what would have to be downloaded, and the command for it."""
        from edgedec_models.storage import human_bytes  # here, as it imports shutil

        size = "" if n_bytes is None else f" ({human_bytes(n_bytes)})"
        super().__init__(f"{reason}, so all of {name}{size} is needed; download it with: edgedec pull {name}")
        self.n_bytes = n_bytes
