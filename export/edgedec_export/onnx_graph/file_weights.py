"""The weights of a GGUF as parts of an ONNX graph: read, packed and written one tensor at a time."""

from collections.abc import Callable
from typing import Any

from edgedec.gguf.file import GGUF
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.parts import Initializers, Scope
from edgedec_export.packing.nodes import Emitted, gather_nodes, linear_nodes
from edgedec_export.packing.weights import Matrix
from edgedec_export.quantizing import Quant, quantize
from edgedec_export.source import read_vector

_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_TWINS = {"data": "rows", "rows": "data"}  # the same bytes, in the shapes of two operators


class FileWeights:
    """The weights of a GGUF; each is read, packed and written when the graph first uses it.

    Attributes:
        initializers: The initializers written so far.
        matrices: By name: how a matrix is stored, its relative squared error, and its bits per weight.
    """

    def __init__(self, gguf: GGUF, data: DataFile, quant: Quant, step: Callable[[str], None]) -> None:
        self.initializers = Initializers(data)
        self.matrices: dict[str, dict[str, Any]] = {}
        self._gguf = gguf
        self._quant = quant
        self._step = step
        self._block_sums: dict[tuple[str, int], str] = {}
        self._last: tuple[str, Matrix] | None = None

    def has(self, name: str) -> bool:
        """Tell whether the GGUF has a tensor of this name."""
        return name in self._gguf.tensors

    def vector(self, name: str) -> str:
        """Return the name of the initializer of a vector, float32[n]."""
        values = read_vector(self._gguf, name)
        self._step(name)
        return self.initializers.add(name, values)

    def linear(self, scope: Scope, name: str, x: str) -> str:
        """Add the product of x, float32[1, n, n_in], and a matrix; return its name: float32[1, n, n_out]."""
        return self._emit(scope, name, linear_nodes(name, x, self._matrix(name), block_sums=self._block_sums))

    def embedding(self, scope: Scope, ids: str) -> str:
        """Add the look-up of token embeddings; return the result's name: float32[1, S, n_embd]."""
        return self._emit(scope, _EMBEDDING, gather_nodes(_EMBEDDING, ids, self._matrix(_EMBEDDING)))

    def head(self, scope: Scope, x: str) -> str:
        """Add the product of x, float32[1, R, n_embd], and the head; return its name: float32[1, R, n_vocab]."""
        return self.linear(scope, _HEAD if self.has(_HEAD) else _EMBEDDING, x)

    def _matrix(self, name: str) -> Matrix:
        """Return a matrix. The last one is kept, because head and embedding may be the same."""
        if self._last is None or self._last[0] != name:
            self._last = None  # free its memory first
            quantized = quantize(self._gguf, name, self._quant)
            self.matrices[name] = {
                "method": quantized.method,
                "error": quantized.error,
                "bits": quantized.bits_per_weight,
            }
            self._last = name, quantized.matrix
        return self._last[1]

    def _emit(self, scope: Scope, name: str, emitted: Emitted) -> str:
        """Add nodes and initializers of one matrix to the graph, report progress, and return the result's name."""
        nodes, arrays, output = emitted
        scope.nodes += nodes
        for key, array in arrays:
            stem, _, field = key.rpartition(".")
            twin = _TWINS.get(field)
            self.initializers.add(key, array, same_as=f"{stem}.{twin}" if twin else None)
        self._step(name)
        return output
