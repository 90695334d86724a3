"""Cut a mapped file short in the middle of a forward, in a process of its own, which must survive it."""

import os
import subprocess
import sys
from pathlib import Path

# argv: runtime, model, its file to cut: after the check before the first forward. Prints what two forwards raise.
_CHILD = """
import os, sys
from pathlib import Path
import numpy as np
from edgedec import plugins
from edgedec.errors import ModelFormatError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.shared.mapped_files import MappedFiles

runtime, model, file = sys.argv[1:]
check, cut = MappedFiles.check, []

def check_and_cut(self):
    check(self)
    if not cut:
        os.truncate(file, 0)
        cut.append(True)

device = "cpu" if runtime == "npu" else None
own = {"repack": False} if runtime == "llamacpp" else {}
options = LoadOptions(n_ctx=64, n_threads=2, device=device, runtime_options=own)
with plugins.load_plugin(plugins.RUNTIMES, runtime)().load(Path(model), options) as loaded:
    session = loaded.session(64)
    MappedFiles.check = check_and_cut
    for _ in range(2):
        try:
            session.forward(np.arange(40, dtype=np.int32), n_past=0)
            print("no error")
        except ModelFormatError as error:
            print(error)
"""


def cut_in_a_forward(runtime: str, model: Path, file: Path) -> list[str]:
    """Return what two forwards raise, the first with the file cut short after its first check."""
    line = [sys.executable, "-c", _CHILD, runtime, os.fspath(model), os.fspath(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
