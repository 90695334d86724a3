"""Export of a GGUF to a folder with an ONNX graph, tensor by tensor: memory is needed for one of them, and no torch.

    folder = export_onnx("model.gguf", "model-onnx", quant="exact")

What the folder holds says docs/export.md; what is refused is what the cpu runtime refuses.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

from numpy.typing import NDArray

from edgedec import __version__
from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.formats import DATA, GRAPH, VOCABULARY
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.calibration_text import bundled_text
from edgedec_export.folder import new_folder, write_manifest, write_vocabulary
from edgedec_export.onnx_graph.decoder import build_graph, local_layers
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.kv_int8 import find_scales, with_int8_cache
from edgedec_export.onnx_graph.parts import Initializers, Scope, require_onnx
from edgedec_export.packing.nodes import gather_nodes, linear_nodes
from edgedec_export.packing.weights import Matrix
from edgedec_export.quantizing import Quant, quantize
from edgedec_export.source import read_vector, rope_factors, source_facts, tensor_steps
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.tokenizer import open_tokenizer

KV_TYPES = ("f32", "int8")

_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_TWINS = {"data": "rows", "rows": "data"}  # the same bytes in the shapes that two operators want


def export_onnx(
    path: str | Path,
    out: str | Path,
    *,
    quant: str = "exact",
    kv: str = "f32",
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Export a GGUF and return the folder that was made.

    Args:
        path: A GGUF, or the first part of a split one.
        out: Folder to make; nothing, or with `force` an earlier export, may be there.
        quant: "exact" keeps the value of every weight, "balanced" and "small" choose per tensor (`quantizing`).
        kv: Element type of the graph's KV cache: "f32", or "int8", whose scales are found by running the float graph
            on a short text: it is loaded for that.
        on_progress: Told of the bytes of the source that are done.
        cancel: Stops the export between two tensors; nothing is left behind.

    Raises:
        RequestError: There is no such `quant` or `kv`, or something else is at `out`.
        ModelNotFoundError, ModelFormatError: There is no such file, or it is damaged.
        UnsupportedModelError: An architecture, tensor or metadata key that the cpu runtime does not know.
        RuntimeUnavailableError: The package onnx is missing.
        StorageError: Reading or writing failed, or the disk is full.
        CancelledError: It was cancelled.
    """
    for name, value, choices in (("quant", quant, get_args(Quant)), ("kv", kv, KV_TYPES)):
        if value not in choices:
            raise RequestError(f"{name} is {value!r}; it must be {' or '.join(choices)}")
    require_onnx()
    gguf = read_gguf(path)
    network = read_network(gguf)
    with new_folder(Path(out), force=force) as folder:
        with DataFile(folder / DATA) as data:
            weights = FileWeights(gguf, Initializers(data), cast(Quant, quant), tensor_steps(gguf, on_progress, cancel))
            model = build_graph(network, weights, weights.initializers, rope_factors=rope_factors(gguf))
        (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        if kv == "int8":
            _check(cancel, gguf)
            with_int8_cache(model, find_scales(folder, network, open_tokenizer(gguf).encode(bundled_text())))
            (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        write_vocabulary(gguf, folder / VOCABULARY)
        facts = _facts(gguf, network, quant, kv) | {"matrices": weights.matrices}
        write_manifest(folder, facts, {DATA: data.sha256})
        _check(cancel, gguf)
    return Path(out)


class FileWeights:
    """Weights of a GGUF, read, packed and written out when the graph first needs them.

    Attributes:
        initializers: Where they go.
        matrices: By name, how a matrix was stored, its relative squared error, and bits per weight.
    """

    def __init__(self, gguf: GGUF, initializers: Initializers, quant: Quant, step: Callable[[str], None]) -> None:
        self.initializers = initializers
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
        nodes, arrays, output = linear_nodes(name, x, self._matrix(name), block_sums=self._block_sums)
        scope.nodes += nodes
        self._add(arrays)
        self._step(name)
        return output

    def embedding(self, scope: Scope, ids: str) -> str:
        """Add the look-up of the tokens' embeddings and return the result's name: f32[1, S, n_embd]."""
        nodes, arrays, output = gather_nodes(_EMBEDDING, ids, self._matrix(_EMBEDDING))
        scope.nodes += nodes
        self._add(arrays)
        self._step(_EMBEDDING)
        return output

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

    def _add(self, arrays: list[tuple[str, NDArray[Any]]]) -> None:
        for name, array in arrays:
            stem, _, field = name.rpartition(".")
            twin = _TWINS.get(field)
            self.initializers.add(name, array, same_as=f"{stem}.{twin}" if twin else None)


def _check(cancel: CancelToken | None, gguf: GGUF) -> None:
    if cancel is not None:
        cancel.check(f"exporting {gguf.paths[0].name}")


def _facts(gguf: GGUF, network: Network, quant: str, kv: str) -> dict[str, Any]:
    """Return what the manifest says beside the files."""
    return {
        "target": "cpu",
        "quant": quant,
        "kv": kv,
        "edgedec": __version__,
        "source": source_facts(gguf),
        "architecture": network.architecture,
        "n_layer": network.n_layer,
        "n_vocab": network.n_vocab,
        "n_embd": network.n_embd,
        "n_head_kv": network.n_head_kv,
        "head_dim": network.head_dim,
        "local_layers": local_layers(network),
    }
