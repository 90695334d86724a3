"""Print a line for each of a few tiny models and each instruction set: the hashes of its file and of its logits.

The lines are equal on systems with the same processor: `python tests/packaging/same_bits.py` on Linux, and with Python
for Windows under wine.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu

TOKENS = np.random.default_rng(1).integers(0, 260, 48).astype(np.int32)
NAMES = ("llama", "gemma3", "qwen3moe", "qwen3next")


def main() -> None:
    """Write the models to a temporary folder, and run each with each instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = write_tiny(Path(folder) / f"{name}.gguf", ARCHITECTURES[name])
            file = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for isa in instruction_sets():
                os.environ["EDGEDEC_CPU_ISA"] = isa
                with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=2, max_rows=64)) as model:
                    rows = model.session(64).forward(TOKENS, n_past=0, rows="all").logits
                print(name, isa, file, hashlib.sha256(rows.tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
