"""Running checks; a check is a function that raises unless its contract holds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from edgedec.errors import ConformanceError


class NotApplicableError(Exception):
    """A check does not apply to the subject; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        name: The check's name; a stable one.
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
