"""The tables of docs/models.md are what the runtimes do with tiny models of every architecture and tensor type.

The models of an architecture mix all types that a column can have, so that a "yes" is one with each of these types.

EDGEDEC_WRITE_TABLE=1 has the test write the table instead of comparing it.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import (
    ARCHITECTURES,
    DIFFUSION,
    EXPORTED_TYPES,
    OWN,
    TILE_TYPES,
    Tiny,
    tiny_metadata,
    tiny_tensors,
    write_tiny,
)

from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup
from edgedec.plugins import ARCHITECTURES as GROUP
from edgedec.plugins import plugins
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.weights import tile_job
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[1] / "docs/models.md"
BEGIN, END = "<!-- table of tests/test_model_table.py -->\n", "<!-- end of the table -->\n"
TOKENS = np.random.default_rng(2).integers(0, 260, 24).astype(np.int32)
COLUMNS = ("cpu", "llamacpp", "export to ONNX", "exact drafts", "trained drafts", "parallel", "streaming")
NO_WEIGHTS = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})

Bits = NDArray[np.uint32]


def step_bits(model: Model) -> Bits:
    """Return the bits of the logits behind every token of TOKENS, from single steps."""
    session = model.session(64)
    rows = [session.forward(TOKENS[i : i + 1], n_past=i).logits.copy() for i in range(len(TOKENS))]
    return np.concatenate(rows).view(np.uint32)


def does(act: Callable[[], bool]) -> bool:
    """Return what `act` returns; False where it raises an error of edgedec."""
    try:
        return act()
    except EdgedecError:
        return False


def runs(runtime: Runtime, path: Path) -> bool:
    """Return whether a runtime takes a model and returns finite logits."""

    def forward() -> bool:
        with runtime.load(path, LoadOptions(n_ctx=64, n_threads=1)) as model:
            return bool(np.isfinite(model.session(64).forward(TOKENS[:4], n_past=0).logits).all())

    return does(lambda: runtime.accepts(path) is None and forward())


def drafts(model: Model, expected: Bits) -> bool:
    """Return whether the nodes of a tree have the bits of single steps."""
    session = model.session(64)
    session.forward(TOKENS[:8], n_past=0)
    nodes, parents = np.repeat(TOKENS[8:12], 2), np.array([-1, -1, 0, 1, 2, 3, 4, 5], np.int32)
    found = session.forward(nodes, n_past=8, parents=parents, rows="all").logits.view(np.uint32)
    return bool((found == np.repeat(expected[8:12], 2, axis=0)).all())


def parallel(model: Model, expected: Bits) -> bool:
    """Return whether two texts in one forward have the bits of each alone."""
    first, second = model.session(64), model.session(64)
    first.forward(TOKENS[:9], n_past=0)
    items = [
        ForwardItem(first, 9, (RowGroup(TOKENS[9:12]),), rows="all"),
        ForwardItem(second, 0, (RowGroup(TOKENS),), rows="all"),
    ]
    one, other = (forward.logits.view(np.uint32) for forward in model.forward(items))
    return bool((one == expected[9:12]).all() and (other == expected).all())


def exact_on_cpu(path: Path, cache: Path) -> tuple[bool, bool, bool]:
    """Return whether trees, two texts at once, and 80 % of the weights in memory have the bits of single steps."""
    gguf = read_gguf(path)
    n_bytes = tile_job(gguf, read_network(gguf), LoadOptions()).n_bytes * 4 // 5
    options = LoadOptions(n_ctx=64, n_threads=2, cache_dir=cache)
    with Cpu().load(path, options) as model:
        expected = step_bits(model)
        found = (not model.card.methods and drafts(model, expected), parallel(model, expected))
    with Cpu().load(path, replace(options, resident_bytes=n_bytes)) as model:
        streamed = model.session(64).forward(TOKENS, n_past=0, rows="all").logits.view(np.uint32)
        return (*found, bool((streamed == expected).all()))


def exports(path: Path, out: Path) -> bool:
    """Return whether the model is exported to ONNX."""
    from edgedec_export.to_onnx import export_onnx

    return does(lambda: export_onnx(path, out, force=True).is_dir())


def trains(path: Path) -> bool:
    """Return whether `edgedec train-drafter` takes the model as a target, and reads its embeddings and its head."""
    from edgedec_export.training.target_parts import TargetParts

    def read() -> bool:
        parts = TargetParts.of(read_gguf(path))
        rows = (parts.embeddings(TOKENS), parts.output_rows(TOKENS))
        return all(np.isfinite(found).all() for found in rows)

    return does(read)


def features(path: Path, exported: Path, folder: Path) -> tuple[bool, ...]:
    """Return what works with a model, in the order of COLUMNS; `exported` is the same with types that exports take."""
    on_cpu = runs(Cpu(), path)
    exact_drafts, in_parallel, streaming = exact_on_cpu(path, folder / "cache") if on_cpu else (False, False, False)
    return (
        on_cpu,
        runs(LlamaCpp(), path),
        exports(exported, folder / "onnx"),
        exact_drafts,
        trains(exported),
        in_parallel,
        streaming,
    )


DEALT_TYPES = (*TILE_TYPES, *TILE_TYPES[:2])  # 29: dealt in turn, 27 would not reach all of phi3's nine matrices


def write_mixed(path: Path, tiny: Tiny, types: tuple[str, ...]) -> Path:
    """Write a model of as many layers as it takes for every one of the types to have matrices, 12 at least."""
    for n_layer in range(12, 40):
        write_tiny(path, replace(tiny, types=types, dealt=True, n_layer=n_layer, n_ctx_train=4096))
        if {GGMLType[name] for name in types} <= {tensor.type for tensor in read_gguf(path).tensors.values()}:
            return path
    raise AssertionError(f"no number of layers gives matrices of all types to {tiny.architecture}")


def architecture_rows(folder: Path) -> list[list[str]]:
    """Return the table's rows of architectures, from files that mix all types; a column is of all tiny models."""
    rows = []
    for name in plugins(GROUP):
        if name in ("t5", "t5encoder"):  # they have encoders: tests/runtimes/cpu/test_source_models.py
            continue
        every = (*ARCHITECTURES.values(), *DIFFUSION.values(), *OWN.values())
        tinies = [tiny for tiny in every if tiny.architecture == name]
        assert tinies, f"there is no tiny model of {name}"
        found = [
            features(
                write_mixed(folder / "m.gguf", tiny, DEALT_TYPES),
                write_mixed(folder / "e.gguf", tiny, EXPORTED_TYPES),
                folder,
            )
            for tiny in tinies
        ]
        columns = zip(*found, strict=True)
        rows.append([name, *("yes" if all(column) else "partly" if any(column) else "no" for column in columns)])
    return rows


def type_rows(folder: Path) -> list[list[str]]:
    """Return the table's rows of tensor types, from models whose matrices all have the type."""
    rows = []
    for kind in GGMLType:
        if kind.name in NO_WEIGHTS:
            continue
        path, tiny = folder / "t.gguf", Tiny(types=(kind.name,), n_layer=8)
        if kind.name in TILE_TYPES:
            write_tiny(path, tiny)
        else:
            write_zeros(path, kind)
        rows.append([kind.name, *("yes" if one else "no" for one in features(path, path, folder))])
    return rows


def write_zeros(path: Path, kind: GGMLType) -> None:
    """Write a model whose matrices, but that of the embeddings, are zeros of a type."""
    tensors = dict(tiny_tensors(Tiny(n_layer=8)))
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and name != "token_embd.weight":
            n_bytes = tensor.shape[0] * tensor.shape[1] // kind.block_size * kind.block_bytes
            tensors[name] = RawTensor(kind, tensor.shape, bytes(n_bytes))
    write_gguf(path, tiny_metadata(Tiny(n_layer=8)), tensors)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table of Markdown; names whose other cells are equal share a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    lines = [head, ["---"] * len(head), *([", ".join(shared), *cells] for cells, shared in names.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not beside the tests")
def test_the_table_of_models_is_true(tmp_path: Path) -> None:
    """Every cell of the document is what the runtimes do now."""
    found = table(["architecture", *COLUMNS], architecture_rows(tmp_path)) + "\n"
    found += table(["tensor type", *COLUMNS], type_rows(tmp_path))
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("EDGEDEC_WRITE_TABLE"):
        DOCUMENT.write_text(before + BEGIN + found + END + after, encoding="utf-8")
        return
    assert written == found
