"""What a check of a runtime requires of an error and of arrays."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ConformanceError
from edgedec.testing.results import require


def require_raises(
    expected: type[Exception] | tuple[type[Exception], ...], what: str, call: Callable[[], object]
) -> None:
    """Fail the check unless the call raises one of the expected errors; `what` names the call in the message."""
    names = " or ".join(kind.__name__ for kind in (expected if isinstance(expected, tuple) else (expected,)))
    try:
        call()
    except expected:
        return
    except Exception as error:
        raise ConformanceError(f"{what} raised {type(error).__name__} ({error}), expected {names}") from error
    raise ConformanceError(f"{what} raised nothing, expected {names}")


def require_equal(found: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
    """Fail the check unless the arrays have the same shape and the same bits."""
    require(found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}")
    n_other = int(np.count_nonzero(found.view(np.uint32) != expected.view(np.uint32)))
    if n_other:
        largest = float(np.nanmax(np.abs(found.astype(np.float64) - expected)))
        raise ConformanceError(f"{what}: {n_other} of {found.size} values differ, by up to {largest:.3g}")


def require_close(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float, what: str) -> None:
    """Fail the check unless each row differs by at most `tolerance` times the spread of the expected row."""
    require(found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}")
    for i, (row, wanted) in enumerate(zip(found, expected, strict=True)):
        off = float(np.max(np.abs(row.astype(np.float64) - wanted)) / (float(np.ptp(wanted)) or 1.0))
        require(off <= tolerance, f"{what}: row {i} is off by {off:.3g} of its spread, allowed {tolerance:.3g}")
