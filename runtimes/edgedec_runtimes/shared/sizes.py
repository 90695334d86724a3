"""The sizes that a runtime of our own can be asked for."""

from edgedec.errors import OptionError
from edgedec.load_options import LoadOptions

_MOST = {"n_ctx": 1 << 24, "n_parallel": 1 << 16, "n_threads": 256, "max_rows": 1 << 16, "resident_bytes": 1 << 62}


def check_sizes(options: LoadOptions) -> None:
    """Raise OptionError for a size that is out of range; None leaves it to the runtime."""
    for name, most in _MOST.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise OptionError(name, value, f"it must be from 1 to {most}")
