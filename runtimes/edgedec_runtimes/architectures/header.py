"""A model's metadata, as the functions that read an architecture's switches see it."""

from dataclasses import dataclass

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, GGUFArray
from edgedec.gguf.metadata import get_bool, get_float, get_int, get_per_layer, refuse_missing
from edgedec.gguf.model_info import ModelInfo
from edgedec_runtimes.shared.hyperparameters import Hyperparameters

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF's header says. Keys are those below the architecture's name.

    Attributes:
        info: What describe said of it.
    """

    gguf: GGUF
    info: ModelInfo
    hyper: Hyperparameters

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, or the default where the file does not give it.

        Raises:
            ModelFormatError: The value is no number, or it is missing and there is no default.
        """
        full = f"{self.info.architecture}.{key}"
        value = get_float(self.gguf, full)
        if value is None:
            return default if default is not None else refuse_missing(self.gguf, full)
        return value

    def whole(self, key: str, default: int) -> int:
        """Return a whole number of at least 0, or the default where the file does not give it."""
        value = get_int(self.gguf, f"{self.info.architecture}.{key}", at_most=_MOST)
        return default if value is None else value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or the default where the file does not give it."""
        value = get_bool(self.gguf, f"{self.info.architecture}.{key}")
        return default if value is None else value

    def every(self, period: int) -> tuple[bool, ...]:
        """Return by layer whether it is the last one of a group of `period` layers."""
        return tuple((layer + 1) % period == 0 for layer in range(self.hyper.n_layer))

    def flags(self, key: str) -> tuple[bool, ...] | None:
        """Return a boolean by block, or None where the file does not give the key."""
        values = get_per_layer(self.gguf, f"{self.info.architecture}.{key}", self.info.n_layer, at_most=1)
        return None if values is None else tuple(map(bool, values))

    def sliding_layers(self, period: int) -> tuple[bool, ...]:
        """Return by layer whether it sees a sliding window; () where the file gives no window.

        Args:
            period: One layer of so many sees everything, the last of each group, where the file does not say which.
        """
        if not self.info.sliding_window:
            return ()
        key = f"{self.info.architecture}.attention.sliding_window_pattern"
        if isinstance(self.gguf.metadata.get(key), GGUFArray):
            pattern = get_per_layer(self.gguf, key, self.hyper.n_layer, at_most=1)
            return tuple(bool(slides) for slides in pattern or ())
        whole_period = self.whole("attention.sliding_window_pattern", period)
        if not whole_period:
            raise ModelFormatError(f"{self.gguf.paths[0]}: {key} is 0, expected 1 or more; download the file again")
        return tuple(not whole for whole in self.every(whole_period))
