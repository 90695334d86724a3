"""The suite on the command line, which prints a line for each check.

python -m edgedec_apps.conformance runtime NAME MODEL.gguf
python -m edgedec_apps.conformance drafter NAME MODEL.gguf [--runtime NAME]
python -m edgedec_apps.conformance memory NAME MODEL.gguf
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edgedec.errors import EdgedecError, PluginError, UnsupportedModelError
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.plugins import DRAFTERS, RUNTIMES, load_plugin, plugins
from edgedec.runtime import Runtime
from edgedec_apps.conformance import CONFORMANCE_VERSION, CheckResult, check_drafter, check_runtime, raise_failures
from edgedec_apps.conformance.memory_reading import measure_memory, to_json

_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}
_N_CTX, _N_PARALLEL = 128, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.command == "memory":
            print(to_json(measure_memory(lambda options: _runtime(chosen.name).load(chosen.model, options))))
        else:
            print(f"conformance suite {CONFORMANCE_VERSION}: {chosen.command} {chosen.name!r} on {chosen.model}")
            raise_failures(_run(chosen))
    except EdgedecError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m edgedec_apps.conformance", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, what in (
        ("runtime", "check an installed runtime"),
        ("drafter", "check an installed drafter"),
        ("memory", "print the memory of a process of its own that has loaded the model, as JSON"),
    ):
        sub = commands.add_parser(command, help=what)
        sub.add_argument("name", help="the name of the entry point")
        sub.add_argument("model", type=Path, help="a model file; a small one will do")
        if command == "drafter":
            sub.add_argument("--draft-head", type=Path, help="the trained head that the drafter 'head' reads")
            sub.add_argument("--runtime", help="the runtime of the model; default: the first that accepts the file")
    return parser


def _run(chosen: argparse.Namespace) -> list[CheckResult]:
    path: Path = chosen.model
    if chosen.command == "runtime":
        probe = [sys.executable, "-m", "edgedec_apps.conformance", "memory", chosen.name, str(path)]
        runtime = _runtime(chosen.name)
        return check_runtime(lambda: _load(runtime, path), on_check=_print, memory_probe=probe, n_ctx=_N_CTX)
    runtime = _runtime(chosen.runtime) if chosen.runtime else _first_runtime(path)
    factory = load_plugin(DRAFTERS, chosen.name)
    return check_drafter(factory, lambda: _load(runtime, path, chosen.draft_head), on_check=_print)


def _load(runtime: Runtime, path: Path, head: Path | None = None) -> Model:
    return runtime.load(path, LoadOptions(n_ctx=_N_CTX, n_parallel=_N_PARALLEL, draft_head=head))


def _runtime(name: str) -> Runtime:
    loaded = load_plugin(RUNTIMES, name)
    runtime: Runtime = loaded() if isinstance(loaded, type) else loaded
    return runtime


def _first_runtime(path: Path) -> Runtime:
    """Return the first runtime that is installed and accepts the file."""
    reasons = []
    for name in plugins(RUNTIMES):
        try:
            runtime = _runtime(name)
        except PluginError as error:
            reasons.append(str(error))
            continue
        reason = runtime.accepts(path)
        if reason is None:
            return runtime
        reasons.append(f"{name}: {reason}")
    raise UnsupportedModelError(f"no installed runtime takes {path}: {'; '.join(reasons)}; name another file")


def _print(result: CheckResult) -> None:
    detail = f": {result.detail}" if result.detail else ""
    print(f"{_MARKS[result.status]}  {result.name}{detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
