"""Opens what reads pictures for a model: finds its projector, and chooses the encoder.

Every load of a model imports this file, so what only pictures need is imported once a projector is there.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec.api.options import EngineOptions
from edgedec.companion import companion_of
from edgedec.errors import CapabilityError, EdgedecError, RequestError, RuntimeUnavailableError, argument
from edgedec.loading.resolve import resolve
from edgedec_runtimes.pictures.finding import find_projector

if TYPE_CHECKING:
    from edgedec_runtimes.pictures.child import PictureChild
    from edgedec_runtimes.pictures.contract import PictureEncoder
    from edgedec_runtimes.pictures.fewer_rows import RowChooser
    from edgedec_runtimes.pictures.header import Opening
    from edgedec_runtimes.pictures.reader import PictureReader

_CAP_PART = 16  # the part of a memory cap that kept rows may take


def picture_reader(model: Path, options: EngineOptions) -> "PictureReader | None":
    """Return what reads pictures for a model's file; None where no projector is named, and none that fits is beside it.

    Raises:
        EdgedecError: The projector that is named is not found, damaged, of a kind that is not read, or another model's;
            or a method leaves rows of pictures out that are not read, or not by our own encoder.
    """
    chooser, asked = _chooser(options), None if options.projector == "auto" else options.projector
    projector = find_projector(model) if options.projector == "auto" else None
    if asked is not None:
        projector = resolve(asked, options.resolving, "projector")
    if projector is None:
        if chooser is not None:
            why = f"{chooser.what} need the model's projector, and none lies beside {model.name}"
            raise RequestError(f"{why}; name it ({argument('projector')}), or leave the method out")
        return None
    cap = options.cap_bytes
    try:
        return open_reader(model, projector, options.n_threads, options.image_max_tokens, cap, chooser)
    except EdgedecError:
        if asked is not None or chooser is not None:
            raise
        return None


def _chooser(options: EngineOptions) -> "RowChooser | None":
    """Return the lossy method that leaves rows of pictures out, where there is one."""
    if not options.lossy.methods:
        return None
    from edgedec_runtimes.pictures.fewer_rows import RowChooser

    method = companion_of(options.lossy.methods)
    return method if isinstance(method, RowChooser) else None


def open_reader(
    model: Path,
    projector: Path,
    n_threads: int | None,
    max_tokens: int | None = None,
    cap_bytes: int | None = None,
    chooser: "RowChooser | None" = None,
) -> "PictureReader":
    """Return what reads pictures for a model with a projector file.

    Args:
        model: The model's file.
        projector: The projector file.
        n_threads: Threads that encode; None for as many as the processor has cores.
        max_tokens: Most rows of a picture, or None.
        cap_bytes: The memory cap, which limits pixels and kept rows, or None.
        chooser: Leaves rows of pictures out; None to keep all.

    Raises:
        EdgedecError: The projector is damaged, of a kind that is not read, or another model's; or `chooser` can't work.
    """
    from edgedec_runtimes.pictures.child import PictureChild
    from edgedec_runtimes.pictures.finding import content_hash, fitting_projector, model_facts
    from edgedec_runtimes.pictures.header import opening
    from edgedec_runtimes.pictures.limits import limits_within
    from edgedec_runtimes.pictures.reader import KEPT_BYTES, PictureReader
    from edgedec_runtimes.shared.cpu_count import usable_cores

    header = fitting_projector(projector, model)
    _, architecture = model_facts(model)
    child = PictureChild()
    encoder = choose_encoder(opening(header, architecture, n_threads or usable_cores(), max_tokens), child, chooser)
    most = KEPT_BYTES if cap_bytes is None else min(KEPT_BYTES, cap_bytes // _CAP_PART)
    return PictureReader(encoder, child, content_hash(projector), limits_within(cap_bytes), most)


def choose_encoder(opened: "Opening", child: "PictureChild", chooser: "RowChooser | None" = None) -> "PictureEncoder":
    """Return the encoder for a projector: ours, or for a kind that ours does not know libmtmd's in the child.

    CapabilityError: `chooser` leaves rows out, and only libmtmd encodes the projector.
    """
    from edgedec_runtimes.pictures.mtmd_encoder import MtmdEncoder
    from edgedec_runtimes.pictures.native_encoder import open_native

    native = None
    with suppress(RuntimeUnavailableError):  # our library is not built for this machine
        native = open_native(opened.header.path, opened.header, opened.n_threads, opened.max_tokens, chooser)
    if native is None and chooser is not None and chooser.kept_share < 1:
        header = opened.header
        raise CapabilityError(
            f"{header.path.name}: pictures are encoded by libmtmd ({header.projector_type}), which does not say what "
            f"their patches attend to, so there are no {chooser.what}; leave the method out"
        )
    return MtmdEncoder(opened, child) if native is None else native
