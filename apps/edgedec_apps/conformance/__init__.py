"""Checks whether a runtime or a drafter keeps its contract; third parties run this suite against their own.

    results = check_runtime(lambda: MyRuntime().load(path, LoadOptions(n_parallel=4)))
    raise_failures(results)

The contracts are those of edgedec.model (Model, Session) and edgedec.draft (Drafter). Each check tests one sentence of
them and has a stable name. Where a model does not declare a capability, its check is skipped, and another one tests
that using the capability raises CapabilityError. On the command line: `python -m edgedec_apps.conformance runtime NAME
MODEL`, and the same with `drafter`.
"""

from edgedec_apps.conformance.drafter import check_drafter
from edgedec_apps.conformance.memory_reading import MemoryReading, measure_memory, to_json
from edgedec_apps.conformance.results import CheckResult, raise_failures
from edgedec_apps.conformance.runtime import check_runtime

CONFORMANCE_VERSION = 1
"""The suite's version, which grows when a check is added or becomes stricter."""

__all__ = [
    "CONFORMANCE_VERSION",
    "CheckResult",
    "MemoryReading",
    "check_drafter",
    "check_runtime",
    "measure_memory",
    "raise_failures",
    "to_json",
]
