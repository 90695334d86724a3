"""Stand-ins: a model that is not on this machine, as a file that has the model's header and size and nothing else.

A memory plan needs the names, types and shapes of the tensors, and a model's facts, all of which the header has. The
bytes of a stand-in behind the header were never written, so it takes no more room on the disk than the header.
"""

from dataclasses import replace
from pathlib import Path

from edgedec.errors import OfflineError
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_models.fetching.offline import offline_reason


def model_or_stand_in(name: str, options: ResolveOptions, folder: Path) -> Path:
    """Return a model's file where it is on this machine, else a stand-in for it in `folder`, which must exist.

    Raises:
        NeedsDownloadError: The header can't be read by itself.
        ModelNotFoundError, ModelFormatError, PullError, OfflineError, StorageError, CancelledError: As `resolve`.
    """
    try:
        return resolve(name, replace(options, offline=True))
    except OfflineError:
        if offline_reason(options):
            raise
    from edgedec_models.fetching.distant_header import write_stand_in  # here, as httpx takes long to import

    return write_stand_in(name, options, folder)
