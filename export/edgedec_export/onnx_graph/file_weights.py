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
_TWINS = {"data": "rows", "rows": "data"}  # the same bytes in the shapes that two operators want


class FileWeights:
    """Weights of a GGUF, read, packed and written out when the graph first needs them.

    Attributes:
        initializers: Where they go.
        matrices: By name, how a matrix was stored, its relative squared error, and bits per weight.
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
        """Tell whether there is such a tensor."""
        return name in self._gguf.tensors

    def vector(self, name: str) -> str:
        """Return the initializer f32[n] of a vector."""
        values = read_vector(self._gguf, name)
        self._step(name)
        return self.initializers.add(name, values)

    def linear(self, scope: Scope, name: str, x: str) -> str:
        """Add the product of x, f32[1, n, n_in], and a matrix, and return the result's name: f32[1, n, n_out]."""
        return self._emit(scope, name, linear_nodes(name, x, self._matrix(name), block_sums=self._block_sums))

    def embedding(self, scope: Scope, ids: str) -> str:
        """Add the look-up of the tokens' embeddings and return the result's name: f32[1, S, n_embd]."""
        return self._emit(scope, _EMBEDDING, gather_nodes(_EMBEDDING, ids, self._matrix(_EMBEDDING)))

    def head(self, scope: Scope, x: str) -> str:
        """Add the product of x, f32[1, R, n_embd], and the head's matrix: f32[1, R, n_vocab]."""
        return self.linear(scope, _HEAD if self.has(_HEAD) else _EMBEDDING, x)

    def _matrix(self, name: str) -> Matrix:
        """Return a matrix; the last one is kept, as head and embedding may be one."""
        if self._last is None or self._last[0] != name:
            self._last = None  # its memory first
            found = quantize(self._gguf, name, self._quant)
            self.matrices[name] = {"method": found.method, "error": found.error, "bits": found.bits_per_weight}
            self._last = name, found.matrix
        return self._last[1]

    def _emit(self, scope: Scope, name: str, emitted: Emitted) -> str:
        """Add what computes with a matrix to the graph, and return the result's name."""
        nodes, arrays, output = emitted
        scope.nodes += nodes
        for key, array in arrays:
            stem, _, field = key.rpartition(".")
            twin = _TWINS.get(field)
            self.initializers.add(key, array, same_as=f"{stem}.{twin}" if twin else None)
        self._step(name)
        return output
