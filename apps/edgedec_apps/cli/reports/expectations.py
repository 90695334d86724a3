"""What to expect here of a model: its runtime, its memory, its speed, and what the catalogue has as its draft head."""

from dataclasses import dataclass, replace
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec.plugins import ARCHITECTURES, plugins
from edgedec_models.catalogue import Entry
from edgedec_models.estimates import bytes_of_params, head_fetch_bytes, head_share, least_read_bytes, least_weight_bytes
from edgedec_models.hubs.hub_spec import DEFAULTS
from edgedec_models.hubs.search import FoundModel

_FAST, _MEDIUM = 20, 5  # tokens a second; people read about seven
_BLOCKS = {"dflash": "DFlash", "dspark": "DSpark"}
_KINDS = {"eagle3": "EAGLE-3", "gemma4-assistant": "assistant", **_BLOCKS}


@dataclass(frozen=True, slots=True)
class Expectation:
    """What to expect of a model; what is not known is None.

    Attributes:
        runtime: The runtime that runs its architecture.
        least_bytes: The least memory: its weights.
        most_tokens_per_s: The highest speed without drafts: as often as memory is read fast enough for the weights that
            one token reads.
        chat_bytes: The memory with 4,096 tokens of context, where the catalogue has it.
        tokens_per_s: The speed without drafts that was measured here.
    """

    runtime: str | None
    least_bytes: int | None
    most_tokens_per_s: float | None
    chat_bytes: int | None = None
    tokens_per_s: float | None = None

    def memory(self) -> str:
        """Return the memory for a person."""
        if self.chat_bytes is not None:
            return format_bytes(self.chat_bytes)
        return "-" if self.least_bytes is None else f"from {format_bytes(self.least_bytes)}"

    def speed(self) -> str:
        """Return the speed for a person: its class, and tokens a second.

        >>> Expectation("cpu", None, 12.34).speed(), Expectation("cpu", None, 6.54, tokens_per_s=3.21).speed()
        ('medium, up to 12/s', 'slow, 3.2/s')
        >>> Expectation("cpu", None, None).speed()
        'not measured'
        """
        rate = self.tokens_per_s or self.most_tokens_per_s
        if rate is None:
            return "not measured"
        name = "fast" if rate >= _FAST else "medium" if rate >= _MEDIUM else "slow"
        bound = "" if self.tokens_per_s else "up to "
        return f"{name}, {bound}{rate:.0f}/s" if rate >= 10 else f"{name}, {bound}{rate:.1f}/s"


def of_entry(entry: Entry, bandwidth: float | None, tokens_per_s: float | None = None) -> Expectation:
    """Return what to expect of a model of the catalogue.

    Args:
        bandwidth: Bytes per second that are read from memory here; None where that was not measured.
        tokens_per_s: The speed of the model that was measured here; None before it ran.
    """
    expected = _expected(entry.architecture, least_weight_bytes(entry), least_read_bytes(entry), bandwidth)
    return replace(expected, chat_bytes=entry.chat_bytes, tokens_per_s=tokens_per_s)


def of_found(model: FoundModel) -> Expectation:
    """Return what to expect of the default file of a repository that a hub found.

    No speed is told, as the hub does not say how many of the parameters one token reads.
    """
    n_bytes = None if model.n_params is None else bytes_of_params(model.n_params, DEFAULTS[0])
    return _expected(model.architecture, n_bytes, None, None)


def _expected(
    architecture: str | None, n_bytes: int | None, n_read: int | None, bandwidth: float | None
) -> Expectation:
    speed = None if bandwidth is None or n_read is None else bandwidth / n_read
    return Expectation(None if architecture is None else _runtime(architecture), n_bytes, speed)


def _runtime(architecture: str) -> str:
    """Return the runtime for an architecture: cpu where it has it, else llamacpp, which has most of all."""
    return "cpu" if architecture in plugins(ARCHITECTURES) else "llamacpp"


def head_line(entry: Entry) -> str | None:
    """Return in a line what the catalogue's head for a model brings and costs; None where it has none."""
    head = entry.head
    if head is None:
        return None
    n_bytes, share = head_fetch_bytes(head), head_share(entry)
    size = "its size is known when it is pulled"
    if n_bytes is not None:
        size = f"{'' if head.size_bytes else 'about '}{format_bytes(n_bytes)}"
    unit = "block" if head.architecture in _BLOCKS else "token"
    cost = "" if share is None else f"; a drafted {unit} reads {100 * share:.0f} % of what a step reads"
    whence = "" if head.reference is None else f", {head.reference}, not tried"
    return f"{_KINDS.get(head.architecture, head.architecture)}, {size}, {head.licence}{whence}: {head.note}{cost}"


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
