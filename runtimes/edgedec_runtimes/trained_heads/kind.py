"""EAGLE-3, block and nextn heads as a kind of trained draft heads (edgedec.head_kinds).

Such a head is a GGUF, a checkpoint's folder, or the nextn layer in the file of its model.

Every start with a draft head imports this file, so it imports where they are needed what reads heads.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_gguf, read_header_of
from edgedec.head_kinds import HeadDescription, HeadKind, Kinship

if TYPE_CHECKING:
    from edgedec_runtimes.trained_heads.card import Target

NAME = "trained"
"""The name of the entry point."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def beside(model: Path) -> list[Path]:
    """Return what there is beside a model: NAME.head.gguf, and a folder NAME.head, for a model NAME.gguf."""
    return [path for path in places(model) if path.is_file() or path.is_dir()]


def places(model: Path) -> tuple[Path, Path]:
    """Return the places beside a model where its head may lie: a file and a folder.

    A head of the catalogue is called NAME.head, so that the cache keeps it there.

    >>> [path.name for path in places(Path("big-Q4_K_M-00001-of-00003.gguf"))]
    ['big-Q4_K_M.head.gguf', 'big-Q4_K_M.head']
    """
    stem = _PART.sub("", model.name.removesuffix(".gguf"))
    return model.with_name(f"{stem}.head.gguf"), model.with_name(f"{stem}.head")


def _is_head(path: Path) -> bool:
    from edgedec_runtimes.trained_heads.load import is_head_path

    return is_head_path(path)


def _trained_for(head: Path) -> str | None:
    target = _target(head)
    return None if target is None else target.name


def _kinship(head: Path, model: Path, cache_dir: Path | None) -> Kinship:
    if head == model:
        return Kinship.THESE_WEIGHTS if _has_nextn(model) else Kinship.UNKNOWN
    trained = _target(head)
    if trained is None:
        return Kinship.UNKNOWN
    from edgedec_runtimes.trained_heads.target import target_of

    with suppress(EdgedecError):  # the runtime says what is wrong with the model
        model_target = target_of(read_header_of(model), cache_dir)
        if model_target.weights_hash and model_target.weights_hash == trained.weights_hash:
            return Kinship.THESE_WEIGHTS
        if model_target.norms_hash and model_target.norms_hash == trained.norms_hash:
            return Kinship.THIS_MODEL
    return Kinship.UNKNOWN


def _target(head: Path) -> "Target | None":
    """Return what a head says of its target; None for what is no head, is damaged, or says nothing."""
    from edgedec_runtimes.trained_heads.gguf_values import HeadFile
    from edgedec_runtimes.trained_heads.load import is_head
    from edgedec_runtimes.trained_heads.record import read_record

    try:
        if head.is_dir():
            return read_record(head).target
        if head.suffix != ".gguf":
            return None
        gguf = read_gguf(head)
        return HeadFile(gguf, "").record().target if is_head(gguf) else None
    except EdgedecError:
        return None


def _has_nextn(model: Path) -> bool:
    from edgedec_runtimes.architectures.nextn import nextn_layer

    return nextn_layer(read_header_of(model)) is not None


def _require_fit(head: Path, model: Path) -> None:
    from edgedec_runtimes.trained_heads.load import load_head
    from edgedec_runtimes.trained_heads.target import fit

    fit(load_head(head), read_header_of(model))


def _describe(head: Path) -> HeadDescription:
    from edgedec_runtimes.trained_heads.report import head_document, head_facts

    document = head_document(head)
    return HeadDescription(document, head_facts(document))


TRAINED = HeadKind(_is_head, beside, _trained_for, _kinship, _require_fit, _describe)
