"""The checks of an installed runtime on the command line, a line each.

python tests/support/conformance cpu MODEL.gguf
python tests/support/conformance cpu MODEL.gguf --memory     what the model takes in a process of its own, as JSON
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgedec.load_options import LoadOptions
from edgedec.plugins import RUNTIMES, load_plugin
from edgedec.runtime import Runtime
from edgedec.testing.__main__ import show
from edgedec.testing.results import raise_failures
from support.conformance.memory_reading import measure_memory, probe_of, to_json
from support.conformance.runtime import check_runtime

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("name", help="the name of the runtime's entry point")
parser.add_argument("model", type=Path, help="a model file; a small one will do")
parser.add_argument("--memory", action="store_true", help="only read the memory")
chosen = parser.parse_args()
loaded = load_plugin(RUNTIMES, chosen.name)
runtime: Runtime = loaded() if isinstance(loaded, type) else loaded
if chosen.memory:
    print(to_json(measure_memory(lambda options: runtime.load(chosen.model, options))))
else:
    options = LoadOptions(n_ctx=128, n_parallel=4)
    probe = probe_of(chosen.name, chosen.model)
    raise_failures(check_runtime(lambda: runtime.load(chosen.model, options), on_check=show, memory_probe=probe))
