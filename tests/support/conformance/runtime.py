"""check_runtime, which runs the checks of a runtime."""

from collections.abc import Callable, Sequence

from edgedec.model import Model
from edgedec.testing.results import CheckResult, OnCheck, run_checks
from support.conformance import runtime_basics, runtime_life, runtime_structure
from support.conformance.subject import Subject

RUNTIME_CHECKS = runtime_basics.CHECKS + runtime_structure.CHECKS + runtime_life.CHECKS


def check_runtime(
    load: Callable[[], Model],
    *,
    on_check: OnCheck | None = None,
    memory_probe: Sequence[str] | None = None,
    n_ctx: int = 128,
    tolerance: float = 0.06,
) -> list[CheckResult]:
    """Run every check of a runtime on one model.

    Args:
        load: Loads the model, for at least 3 sessions of `n_ctx` tokens at once (LoadOptions.n_parallel).
        on_check: Called with each result as it comes.
        memory_probe: The command of memory_reading.probe_of, for a runtime that has an entry point. Without a command
            the check of the memory is skipped.
        n_ctx: Tokens of most sessions, at least 64; sessions of a model that was trained for fewer are shorter.
        tolerance: By how much rows may differ that need not have equal bits, as a share of the spread of a row's
            logits. Rounding changes up to 0.05 (a 4-bit Gemma 3 270M), a wrong token 12 tokens ago 0.06 and most often
            0.2.
    """
    return run_checks(RUNTIME_CHECKS, Subject(load, n_ctx, tolerance, memory_probe), on_check)
