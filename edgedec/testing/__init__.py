"""Checks whether a drafter keeps its contract; who writes one runs these checks against it.

    raise_failures(check_drafter(MyDrafter, lambda: MyRuntime().load(path, LoadOptions())))

The contract is that of edgedec.drafter.Drafter. Each check tests one sentence of it and has a stable name. A check that
needs more than the model can do is skipped. On the command line: `python -m edgedec.testing NAME MODEL.gguf`.
"""

from edgedec.testing.drafter import check_drafter
from edgedec.testing.results import CheckResult, raise_failures

__all__ = ["CheckResult", "check_drafter", "raise_failures"]
