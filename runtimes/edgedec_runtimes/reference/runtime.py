"""The reference runtime: a small numpy transformer that can do everything in edgedec.model, slowly.

It is the oracle of the tests: it computes in float32, one row at a time, so that a row has the same bits whatever else
is in a forward. It runs the architectures of the cpu runtime, with F32 and F16 tensors.
"""

import sys
from pathlib import Path

import numpy as np

from edgedec.errors import EdgedecError, OptionError, RequestError, argument
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions, NoOptions, default_n_ctx, read_options
from edgedec.memory.system import resident_bytes
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model
from edgedec.progress import check_cancelled
from edgedec.runtime import RuntimeReport
from edgedec_runtimes.architectures.rope import divisor_tensor
from edgedec_runtimes.reference.model import Needs, ReferenceModel, fingerprint, memory_terms
from edgedec_runtimes.reference.tokenizer import ReferenceTokenizer
from edgedec_runtimes.reference.weights import read_shape, read_weights
from edgedec_runtimes.shared.cards import model_card
from edgedec_runtimes.shared.load_checks import refuse_adapters, refuse_draft_head, refuse_resident_bytes

_KV_DTYPES: dict[str, np.dtype[np.floating]] = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}


class Reference:
    """Implements edgedec.runtime.Runtime."""

    name = "reference"

    def accepts(self, path: Path) -> str | None:
        """Return None when the runtime runs the model, else the reason why it does not."""
        try:
            read_shape(read_gguf(path))
        except EdgedecError as error:
            return str(error)
        return None

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan, from the header."""
        _check_options(options)
        gguf = read_gguf(path)
        shape = read_shape(gguf)
        n_bytes = sum(4 * tensor.n_elements for tensor in gguf.tensors.values())
        sizes = (shape.hyper, shape.switches.recurrence, n_bytes, _KV_DTYPES[options.kv_type])
        needs = Needs(*sizes, resident_bytes() or 0, options.n_parallel)
        return memory_terms(needs, options.n_ctx or default_n_ctx(shape.hyper.n_ctx_train), options.max_rows)

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load the weights as float32."""
        _check_options(options)
        before = resident_bytes() or 0
        gguf = read_gguf(path)
        shape = read_shape(gguf)
        hyper = shape.hyper
        n_ctx = options.n_ctx or default_n_ctx(hyper.n_ctx_train)
        weights, divisors = read_weights(shape, n_ctx), divisor_tensor(gguf, shape.switches.rope, n_ctx)
        check_cancelled(options.cancel, f"loading {path.name}")
        identity = f"reference 2 numpy {np.__version__} {options.kv_type} {hyper} {shape.switches} {divisors}"
        card = model_card(self.name, gguf, hyper, fingerprint(weights, identity))
        needs = Needs(hyper, weights.switches.recurrence, weights.n_bytes, _KV_DTYPES[options.kv_type], before)
        return ReferenceModel(weights, ReferenceTokenizer(gguf, hyper.n_vocab), card, needs)

    def report(self) -> RuntimeReport:
        """Return the versions of numpy and Python."""
        version = f"numpy {np.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}"
        return RuntimeReport(version, ("CPU",), ("for tests: slow, float32 weights",))


def _check_options(options: LoadOptions) -> None:
    """Raise RequestError for options that the runtime can't honour."""
    if options.kv_type not in _KV_DTYPES:
        raise OptionError("kv_type", options.kv_type, f"the reference runtime takes {' and '.join(_KV_DTYPES)}")
    if options.n_gpu_layers not in (None, 0) or options.device not in (None, "CPU"):
        raise RequestError(
            f"the reference runtime has no GPU; leave {argument('device')} and {argument('n_gpu_layers')} out"
        )
    read_options(NoOptions, options.runtime_options, "the reference runtime")
    refuse_draft_head(options, "reference")
    refuse_adapters(options, "reference runtime")
    refuse_resident_bytes(options, "reference")
