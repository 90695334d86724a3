"""Measure an export, and what the gates of its graph cost: the same graph without `If`s is run in turn with it.

    python benchmarks/forwards/onnx_graph.py qwen2.5-coder-1.5b --threads 2

Both graphs run on plain onnxruntime, the KV cache bound in place, behind 64 cached tokens; logits of the two must be
equal to the bit. With --clock cpu times are the process's CPU time, for a machine that does other things as well. Ends
with one line of JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgedec.gguf.file import DATA, GRAPH
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.system import peak_resident_bytes, resident_bytes
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_export.folder import read_manifest
from edgedec_export.to_onnx import export_onnx
from edgedec_runtimes.onnx.library import load_library

_N_PAST = 64
_CAPACITY = 128


class Graph:
    """A graph on plain onnxruntime, with buffers for keys and values."""

    def __init__(self, folder: Path, facts: dict[str, Any], n_threads: int) -> None:
        ort = load_library()
        options = ort.SessionOptions()
        options.intra_op_num_threads = n_threads
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.force_spinning_stop", "1")  # else it takes time from the other graph
        self._session = ort.InferenceSession(str(folder / GRAPH), options, providers=["CPUExecutionProvider"])
        self._inputs = {node.name for node in self._session.get_inputs()}
        self._n_layer = facts["n_layer"]
        shape = (1, facts["n_head_kv"], _CAPACITY, facts["head_dim"])
        names = [f"past_{name}_{i}" for i in range(self._n_layer) for name in ("key", "value")]
        self._buffers = {name: np.zeros(shape, np.float32) for name in names}

    def forward(self, n: int, n_past: int, on: NDArray[np.bool_] | None = None) -> NDArray[np.float32]:
        """Evaluate n rows and return logits f32[n, n_vocab]; `on` says which layers run."""
        total, layers = n_past + n, np.ones(self._n_layer, np.bool_) if on is None else on
        zeros = np.zeros((1, 1, n, total), np.float32)
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": np.arange(n_past, total, dtype=np.int64)[None],
            "position_ids": np.arange(n_past, total, dtype=np.int64)[None],
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "attention_bias": zeros,
            "attention_bias_local": zeros,
            "logit_rows": np.arange(n, dtype=np.int64),
            "attn_on": layers,
            "mlp_on": layers,
            "attention_rows": np.arange(n, dtype=np.int64),
            "tap_rows": np.zeros(self._n_layer, np.int64),
        }
        binding = self._session.io_binding()
        for name in self._inputs & feeds.keys():
            binding.bind_cpu_input(name, feeds[name])
        for name, buffer in self._buffers.items():
            place = ("cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past", "present"), *place)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        logits: NDArray[np.float32] = binding.copy_outputs_to_cpu()[-1][0]
        return logits


def without_gates(exported: Path, folder: Path) -> Path:
    """Write the graph of an export with each `If` replaced by its half-layer; the weights are linked, not copied."""
    model = onnx.load(exported / GRAPH, load_external_data=False)
    switches = ("attn_on", "mlp_on")
    nodes = [inner for node in model.graph.node for inner in _opened(node) if not set(node.input) & set(switches)]
    inputs = [value for value in model.graph.input if value.name not in switches]
    for field, values in ((model.graph.node, nodes), (model.graph.input, inputs)):
        del field[:]
        field.extend(values)
    folder.mkdir()
    (folder / DATA).hardlink_to(exported / DATA)
    (folder / GRAPH).write_bytes(model.SerializeToString())
    return folder


def _opened(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes of an `If`'s then-branch under the names of the `If`'s outputs; any other node as it is."""
    if node.op_type != "If":
        return [node]
    (branch,) = (attribute.g for attribute in node.attribute if attribute.name == "then_branch")
    names = dict(zip((value.name for value in branch.output), node.output, strict=True))
    for inner in branch.node:
        inner.input[:] = [names.get(name, name) for name in inner.input]
        inner.output[:] = [names.get(name, name) for name in inner.output]
    return list(branch.node)


def measure(gated: Graph, plain: Graph, n_layer: int, runs: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the times of every case, one after the other in each run."""
    half = np.arange(n_layer) % 2 == 0
    cases: dict[str, Callable[[], Any]] = {
        "T(1)": lambda: gated.forward(1, _N_PAST),
        "T(1) without gates": lambda: plain.forward(1, _N_PAST),
        "T(8)": lambda: gated.forward(8, _N_PAST),
        "T(8) without gates": lambda: plain.forward(8, _N_PAST),
        "T(1), every second layer": lambda: gated.forward(1, _N_PAST, half),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, case in cases.items():
            started = clock()
            case()
            seconds[name].append(clock() - started)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quant", choices=("exact", "balanced", "small"), default="exact")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    source = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    figures: dict[str, Any] = {"model": args.model, "quant": args.quant, "threads": args.threads, "clock": args.clock}
    with tempfile.TemporaryDirectory() as root:
        started = clock()
        folder = export_onnx(source, Path(root, "gated"), quant=args.quant)
        figures |= {"export_s": clock() - started, "export_peak_bytes": peak_resident_bytes()}
        figures["data_bytes"] = (folder / DATA).stat().st_size
        facts = read_manifest(folder)
        assert facts is not None, "it was just written"
        before = resident_bytes() or 0
        gated = Graph(folder, facts, args.threads)
        figures["resident_bytes_of_session"] = (resident_bytes() or 0) - before
        plain = Graph(without_gates(folder, Path(root, "plain")), facts, args.threads)
        if not np.array_equal(gated.forward(_N_PAST, 0), plain.forward(_N_PAST, 0)):
            print("the logits of the two graphs differ")
            sys.exit(1)
        seconds = measure(gated, plain, facts["n_layer"], args.runs, clock)
    for name, times in seconds.items():
        print(f"{name:26} {1e3 * median(times):8.2f} ms ({1e3 * min(times):.2f} to {1e3 * max(times):.2f})")
        figures[name] = median(times)
    for n in (1, 8):
        print(f"gates cost {100 * (figures[f'T({n})'] / figures[f'T({n}) without gates'] - 1):.1f} % of T({n})")
    print(f"every second layer takes {figures['T(1), every second layer'] / figures['T(1)']:.3f} of T(1)")
    print(json.dumps(figures | provenance()))


if __name__ == "__main__":
    main()
