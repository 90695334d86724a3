"""What the catalogue says of the draft head for a model: what it brings and costs, and how it is had."""

from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec_models.catalogue import Entry
from edgedec_models.estimates import head_fetch_bytes, head_share

_KINDS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}


def head_line(entry: Entry) -> str | None:
    """Return in a line what the catalogue's head for a model brings and costs; None where it has none."""
    head = entry.head
    if head is None:
        return None
    n_bytes, share = head_fetch_bytes(head), head_share(entry)
    size = "" if n_bytes is None else f", {'' if head.size_bytes else 'about '}{format_bytes(n_bytes)}"
    unit = "token" if head.architecture == "eagle3" else "block"
    cost = "" if share is None else f"; a drafted {unit} reads {100 * share:.0f} % of what a step reads"
    whence = "" if head.reference is None else f", {head.reference}"
    return f"{_KINDS.get(head.architecture, head.architecture)}{size}, {head.licence}{whence}: {head.note}{cost}"


def head_document(entry: Entry) -> dict[str, Any] | None:
    """Return the JSON object of the catalogue's head for a model; None where it has none."""
    head = entry.head
    if head is None:
        return None
    return {
        "name": head.name,
        "kind": head.architecture,
        "source": head.reference,
        "size_bytes": head.size_bytes,
        "fetch_bytes": head_fetch_bytes(head),
        "n_params": head.n_params,
        "share_of_a_step": head_share(entry),
        "license": head.licence,
        "note": head.note,
    }
