"""The account of a server's memory: what its process holds beside the models, and what each model may hold."""

from dataclasses import dataclass, field
from pathlib import Path

from edgedec.gguf.places import standing
from edgedec.memory.shedding import give_back
from edgedec.memory.system import resident_bytes
from edgedec_apps.base_memory import LEFT_BYTES

_IN_EACH_PLAN_BYTES = 9_000_000  # 5 MB of code and 4 MB of Python's working memory: both stay after the model
_PLANNING_BYTES = 8_000_000  # measured with 260 tokens
_MOST_PLANNING_BYTES = 80_000_000  # measured with 262,144 tokens: 65 MB


@dataclass(slots=True)
class Account:
    """Whose memory is whose. Used under the turn of a registry: by one thread at a time.

    A model that was unloaded leaves something behind: modules that were imported for it, blocks that the heap can't
    give back. Each plan keeps LEFT_BYTES for that from the first on, so that no plan depends on what was loaded before.
    More may be left where a model brought a large library; so what the process holds without models is measured again
    whenever no model is loaded, less the part that every model's plan counts. While models are loaded, what they did
    not hold when their loading had ended counts as held beside them.

    Args:
        first_bytes: Bytes that the process holds before any model's file is looked at.

    Attributes:
        base_bytes: Bytes that the process may hold without a model, beyond what each plan counts.
    """

    first_bytes: int
    base_bytes: int = field(init=False)
    _models: dict[object, tuple[int, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.base_bytes = self.first_bytes + LEFT_BYTES

    @property
    def others(self) -> bool:
        """Whether a model is loaded."""
        return bool(self._models)

    @property
    def planned_bytes(self) -> int:
        """The most bytes that the loaded models may hold together."""
        return sum(planned for planned, _ in self._models.values())

    def measure(self) -> int:
        """Return the bytes that the process may hold beside its models."""
        if not self._models:
            give_back()  # what the requests since the last unloading have freed
        without = (resident_bytes() or 0) - sum(held for _, held in self._models.values()) - _IN_EACH_PLAN_BYTES
        if not self._models:
            self.base_bytes = max(self.first_bytes + LEFT_BYTES, without)
        return max(self.base_bytes, without)

    def open(self, model: object, planned_bytes: int, before_bytes: int) -> None:
        """Enter a model that was loaded.

        Args:
            model: Stands for the model.
            planned_bytes: The most bytes that the model may hold.
            before_bytes: What the process held before it was loaded.
        """
        self._models[model] = planned_bytes, max(0, (resident_bytes() or 0) - before_bytes)

    def close(self, model: object) -> None:
        """Strike a model off that was unloaded; a second call does nothing."""
        self._models.pop(model, None)


def planning_need(path: Path) -> int:
    """Return the most bytes that are held for a while to plan a model, whose header and vocabulary are read for it.

    They grow with the vocabulary, whose size is not known before; but a file is larger than its vocabulary, and more
    than 262,144 tokens are not expected.
    """
    if not standing(path).is_file():  # the folder of an export
        return _MOST_PLANNING_BYTES
    return min(_PLANNING_BYTES + standing(path).stat().st_size // 2, _MOST_PLANNING_BYTES)
