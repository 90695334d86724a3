"""Running checks; a check is a function that raises unless its contract holds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ConformanceError


class NotApplicableError(Exception):
    """A check does not apply to the subject; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        name: The check's name; stable within a CONFORMANCE_VERSION.
        holds: One sentence that is true where the check passes.
        status: Whether the check passed, failed, or was skipped because it does not apply.
        detail: What a failed check found, or why the check was skipped; else empty.
    """

    name: str
    holds: str
    status: Literal["passed", "failed", "skipped"]
    detail: str = ""


OnCheck = Callable[[CheckResult], None]


class Checkable(Protocol):
    """A runtime's model or a drafter that is under test."""

    def clean_up(self, *, failed: bool) -> None:
        """Get ready for the next check; what a failed check leaves behind is not to be trusted."""

    def close(self) -> None:
        """Free everything."""


S = TypeVar("S", bound=Checkable)


def run_checks(checks: Iterable[Callable[[S], None]], subject: S, on_check: OnCheck | None) -> list[CheckResult]:
    """Run the checks one after another, close the subject, and return the results."""
    results = []
    try:
        for check in checks:
            result = _run(check, subject)
            results.append(result)
            if on_check is not None:
                on_check(result)
    finally:
        subject.close()
    return results


def _run(check: Callable[[S], None], subject: S) -> CheckResult:
    """Run one check; whatever the check raises becomes its result."""
    name = check.__name__
    holds = (check.__doc__ or "").strip().splitlines()[0]
    result = CheckResult(name, holds, "passed")
    try:
        check(subject)
    except NotApplicableError as reason:
        result = CheckResult(name, holds, "skipped", str(reason))
    except Exception as error:  # raised by the subject, which is what is tested
        result = CheckResult(name, holds, "failed", _message(error))
    try:
        subject.clean_up(failed=result.status == "failed")
    except Exception as error:
        if result.status != "failed":
            result = CheckResult(name, holds, "failed", f"closing after the check: {_message(error)}")
    return result


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ConformanceError) else f"{type(error).__name__}: {error}"


def raise_failures(results: Iterable[CheckResult]) -> None:
    """Raise ConformanceError with a line for each failed check, if there is one."""
    failed = [f"  {result.name}: {result.detail}" for result in results if result.status == "failed"]
    if failed:
        raise ConformanceError(f"{len(failed)} conformance checks failed:\n" + "\n".join(failed))


def require(holds: bool, otherwise: str) -> None:
    """Fail the check with the message `otherwise` unless `holds`."""
    if not holds:
        raise ConformanceError(otherwise)


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
