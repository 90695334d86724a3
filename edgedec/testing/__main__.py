"""The checks of an installed drafter on the command line, a line each.

python -m edgedec.testing NAME MODEL.gguf [--runtime NAME]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec.load_options import LoadOptions
from edgedec.plugins import DRAFTERS, RUNTIMES, load_plugin
from edgedec.runtime import Runtime
from edgedec.testing import CheckResult, check_drafter, raise_failures

_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m edgedec.testing", description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="the name of the drafter's entry point")
    parser.add_argument("model", type=Path, help="a model file; a small one will do")
    parser.add_argument("--draft-head", type=Path, help="the trained head that the drafter 'head' reads")
    parser.add_argument("--runtime", default="cpu", help="the runtime of the model (default: cpu)")
    chosen = parser.parse_args(arguments)
    options = LoadOptions(n_ctx=128, n_parallel=4, draft_head=chosen.draft_head)
    try:
        loaded = load_plugin(RUNTIMES, chosen.runtime)
        runtime: Runtime = loaded() if isinstance(loaded, type) else loaded
        print(f"{chosen.name!r} on {chosen.model}")
        factory = load_plugin(DRAFTERS, chosen.name)
        raise_failures(check_drafter(factory, lambda: runtime.load(chosen.model, options), on_check=show))
    except EdgedecError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def show(result: CheckResult) -> None:
    """Print a line for a check."""
    detail = f": {result.detail}" if result.detail else ""
    print(f"{_MARKS[result.status]}  {result.name}{detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
