"""Models that run in a child process, which imports this file to load them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.child.model import ChildModel, Hosting
from edgedec_runtimes.reference.runtime import Reference


def load_reference(path: Path, options: LoadOptions) -> Model:
    """Load a model in the child."""
    return Reference().load(path, options)


def _nothing() -> None:
    return


def hosted(path: Path, options: LoadOptions, prepare: Callable[[], None] = _nothing) -> ChildModel:
    """Load a model on the reference runtime in a child; `prepare` is called before a child is started."""
    return ChildModel(
        Hosting("support.processes.hosted:load_reference", path, options, lambda _n_ctx, _n_rows: (), prepare)
    )


def child_of_a_killed_parent(path: Path) -> int:
    """Load a model in a process of its own, which kills itself; return the number of the child that it started."""
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom support.processes.hosted import hosted\n"
        "from edgedec.load_options import LoadOptions\n"
        "model = hosted(Path(sys.argv[1]), LoadOptions(n_ctx=16))\n"
        "print(model.child.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return int(done.stdout)
