"""What to expect here of a model that is not on this machine: its runtime, the least memory, the highest speed."""

from dataclasses import dataclass

from edgedec.memory_plan import format_bytes
from edgedec.plugins import ARCHITECTURES, plugins
from edgedec_models.catalogue import Entry
from edgedec_models.estimates import bytes_of_params, least_read_bytes, least_weight_bytes
from edgedec_models.hubs.hub_spec import DEFAULTS
from edgedec_models.hubs.search import FoundModel


@dataclass(frozen=True, slots=True)
class Expectation:
    """What to expect of a model; what is not known is None.

    Attributes:
        runtime: The runtime that runs its architecture.
        least_bytes: The least memory: its weights.
        most_tokens_per_s: The highest speed without drafts: as often as memory is read fast enough for the weights that
            one token reads.
    """

    runtime: str | None
    least_bytes: int | None
    most_tokens_per_s: float | None

    def memory(self) -> str:
        """Return the memory for a person."""
        return "-" if self.least_bytes is None else f"from {format_bytes(self.least_bytes)}"

    def speed(self) -> str:
        """Return the speed for a person.

        >>> Expectation("cpu", None, 12.34).speed(), Expectation("cpu", None, 6.54).speed()
        ('up to 12/s', 'up to 6.5/s')
        """
        most = self.most_tokens_per_s
        return "-" if most is None else f"up to {most:.0f}/s" if most >= 10 else f"up to {most:.1f}/s"


def of_entry(entry: Entry, bandwidth: float | None) -> Expectation:
    """Return what to expect of a model of the catalogue, where memory is read at `bandwidth` bytes per second."""
    return _expected(entry.architecture, least_weight_bytes(entry), least_read_bytes(entry), bandwidth)


def of_found(found: FoundModel) -> Expectation:
    """Return what to expect of the default file of a repository that a hub found.

    No speed is told, as the hub does not say how many of the parameters one token reads.
    """
    n_bytes = None if found.n_params is None else bytes_of_params(found.n_params, DEFAULTS[0])
    return _expected(found.architecture, n_bytes, None, None)


def _expected(
    architecture: str | None, n_bytes: int | None, n_read: int | None, bandwidth: float | None
) -> Expectation:
    speed = None if bandwidth is None or n_read is None else bandwidth / n_read
    return Expectation(None if architecture is None else _runtime(architecture), n_bytes, speed)


def _runtime(architecture: str) -> str:
    """Return the runtime for an architecture: cpu where it has it, else llamacpp, which has most of all."""
    return "cpu" if architecture in plugins(ARCHITECTURES) else "llamacpp"
