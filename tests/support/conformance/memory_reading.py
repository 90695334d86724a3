"""The memory that a model takes beside the memory it planned, measured in a process that does nothing else."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgedec.errors import ConformanceError
from edgedec.load_options import LoadOptions
from edgedec.memory.system import held_bytes
from edgedec.memory_plan import HOST
from edgedec.model import Model
from edgedec.runtime import processes_of

_N_CTX, _N_ROWS = 512, 16
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The sum of the host's terms of Model.memory(), and the resident memory of the process; None where it is unknown.

    Processes that belong to the model count as the process's.
    """

    planned_bytes: int
    resident_bytes: int | None


def measure_memory(load: Callable[[LoadOptions], Model]) -> MemoryReading:
    """Load a model, fill one session, and read the resident memory; to be called in a process of its own."""
    with load(LoadOptions(n_ctx=_N_CTX, max_rows=_N_ROWS)) as model:
        n_rows = min(_N_ROWS, model.capabilities.max_rows)
        session = model.session(_N_CTX)
        tokens = np.random.default_rng(0).integers(0, model.card.n_vocab, _N_CTX).astype(np.int32)
        session.forward(tokens[:-n_rows], n_past=0)
        logits = session.forward(tokens[-n_rows:], n_past=_N_CTX - n_rows, rows="all").logits
        held = held_bytes(processes_of(model)) if len(logits) == n_rows else None
        planned = sum(term.n_bytes for term in model.memory(_N_CTX, n_rows) if term.device == HOST)
    return MemoryReading(planned, held)


def probe_of(runtime: str, model: Path) -> list[str]:
    """Return the command that measures the memory of a model on an installed runtime."""
    return [sys.executable, str(Path(__file__).parent), runtime, str(model), "--memory"]


def to_json(reading: MemoryReading) -> str:
    """Return the line that read_memory expects a probe to print."""
    return json.dumps(asdict(reading))


def read_memory(probe: Sequence[str]) -> MemoryReading:
    """Run a probe: a command whose last line of output is to_json(measure_memory(load)).

    Raises:
        ConformanceError: The command fails, or prints something else.
    """
    done = subprocess.run(list(probe), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise ConformanceError(f"the memory probe ended with exit status {done.returncode}, expected 0: {complaint[0]}")
    try:
        return MemoryReading(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, TypeError, IndexError) as error:
        raise ConformanceError(
            f"the memory probe printed {done.stdout[-200:]!r}, expected the line of to_json()"
        ) from error
