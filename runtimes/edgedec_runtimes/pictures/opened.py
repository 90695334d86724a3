"""Opens what reads pictures for a model: finds its projector, and chooses the encoder."""

from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec_runtimes.pictures.child import PictureChild
from edgedec_runtimes.pictures.finding import content_hash, find_projector, fitting_projector, model_facts
from edgedec_runtimes.pictures.limits import limits_within
from edgedec_runtimes.pictures.mtmd_encoder import MtmdEncoder
from edgedec_runtimes.pictures.opening import Opening, opening
from edgedec_runtimes.pictures.reader import KEPT_BYTES, Encoder, PictureReader
from edgedec_runtimes.shared.cpu_count import usable_cores

_CAP_PART = 16  # the part of a memory cap that kept rows may take


def picture_reader(
    model: Path,
    projector: Path | None,
    *,
    n_threads: int | None = None,
    max_tokens: int | None = None,
    cap_bytes: int | None = None,
) -> PictureReader | None:
    """Return what reads pictures for a model; None where no projector is named, and none that fits lies beside it.

    Args:
        model: The model's file.
        projector: The projector file that was asked for, or None for the one beside the model.
        n_threads: Threads that encode; None for what the processor has.
        max_tokens: Most rows of a picture, or None.
        cap_bytes: The memory cap, which limits pixels and kept rows, or None.

    Raises:
        EdgedecError: The projector that is named is damaged, of a kind that is not read, or another model's.
    """
    found = projector or find_projector(model)
    if found is None:
        return None
    try:
        header = fitting_projector(found, model)
        _, architecture = model_facts(model)
        projector_hash = content_hash(found)
    except EdgedecError:
        if projector is not None:
            raise
        return None
    child = PictureChild()
    encoder = choose_encoder(opening(header, architecture, n_threads or usable_cores(), max_tokens), child)
    most = KEPT_BYTES if cap_bytes is None else min(KEPT_BYTES, cap_bytes // _CAP_PART)
    return PictureReader(encoder, child, projector_hash, limits_within(cap_bytes), most)


def choose_encoder(opened: Opening, child: PictureChild) -> Encoder:
    """Return the encoder for a projector: libmtmd in the child, which knows every kind."""
    return MtmdEncoder(opened, child)
