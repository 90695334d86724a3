"""Finds ONNX Runtime, opens graphs in it, and turns its errors into edgedec's."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgedec.errors import (
    EdgedecError,
    MemoryCapError,
    ModelFormatError,
    RuntimeUnavailableError,
    UnsupportedModelError,
    argument,
)
from edgedec_runtimes.onnx.exported import OPTIMUM, Export
from edgedec_runtimes.onnx.foreign.contract import Contract, Port, read_contract
from edgedec_runtimes.onnx.providers import CPU, ChosenProvider

_OLDEST = (1, 24)
_NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # onnxruntime's own variable, which it reads when it is imported
_FATAL = 4  # the only level that is logged: the reason of any other error is in the exception
_NO_MEMORY = ("bad_alloc", "allocate memory", "out of memory", "available memory")
_NO_DEVICE = ("webgpu", "no supported adapters", "device is lost", "device lost", "device_lost")
_NO_OPERATOR = ("not implemented", "could not find an implementation", "no op registered", "is not a registered")


def load_library() -> Any:
    """Import onnxruntime and return the module.

    From 1.29 on, official builds of onnxruntime report every session to Microsoft, with names of models and an id of
    the device. That is switched off here, unless ORT_DISABLE_TELEMETRY is set to another value than 1.

    Raises:
        RuntimeUnavailableError: onnxruntime is not installed, broken, or too old.
    """
    silent = os.environ.setdefault(_NO_TELEMETRY, "1") == "1"
    try:
        import onnxruntime  # type: ignore[import-untyped, unused-ignore]
    except Exception as error:  # a broken installation may raise anything
        raise RuntimeUnavailableError(
            f"the onnx runtime needs the package onnxruntime, which does not import ({type(error).__name__}: {error}); "
            "pip install onnxruntime"
        ) from error
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if version < _OLDEST:
        raise RuntimeUnavailableError(
            f"onnxruntime {onnxruntime.__version__} is installed, expected {_OLDEST[0]}.{_OLDEST[1]} or newer; "
            "pip install --upgrade onnxruntime"
        )
    if silent:
        onnxruntime.disable_telemetry_events()  # in a program that had imported it before
    return onnxruntime


def is_imported() -> bool:
    """Return whether onnxruntime has been imported in this process."""
    return "onnxruntime" in sys.modules


def open_graph(ort: Any, export: Export, chosen: ChosenProvider, n_threads: int) -> Any:
    """Open the graph of an export whose files were verified, and return ONNX Runtime's InferenceSession.

    There is no memory arena: the memory that a forward takes is given back after the forward.

    Raises:
        UnsupportedModelError: The graph has an operator that this onnxruntime or the provider lacks, or inputs and
            outputs other than those that optimum gives a decoder.
        ModelFormatError: The graph is not the one that the manifest describes.
        MemoryCapError: The system has no memory for the graph.
        RuntimeUnavailableError: The provider takes no part of the graph.
    """
    options = session_options(ort, n_threads)
    on_device = chosen.provider.device != CPU
    if on_device:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    names = None
    if chosen.devices:
        options.add_provider_for_devices(list(chosen.devices), {})
    else:
        names = [chosen.provider.name, *(["CPUExecutionProvider"] if on_device else [])]
    with translated(f"{export.graph}: it can't be opened"):
        session = ort.InferenceSession(
            export.graph, options, providers=names, enable_fallback=0, read_config_from_model=0
        )
    if export.kind == OPTIMUM:
        read_foreign(session, export)
    else:
        _check_signature(session, export)
    if on_device:
        _require_used(session, chosen, export)
    return session


def session_options(ort: Any, n_threads: int) -> Any:
    """Return ONNX Runtime's options for a graph on `n_threads` threads.

    Threads that wait do not spin: where another program wants a core, spinning threads make a token take five times as
    long.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = n_threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run_options(ort: Any) -> Any:
    """Return the options of one run; setting their `terminate` ends the run."""
    options = ort.RunOptions()
    options.log_severity_level = _FATAL
    return options


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn errors that ONNX Runtime raises inside the block into EdgedecErrors, whose messages begin with `what`."""
    try:
        yield
    except EdgedecError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        text = " ".join(str(error).split())[:500]
        low = text.lower()
        if any(phrase in low for phrase in _NO_MEMORY) or isinstance(error, MemoryError):
            raise MemoryCapError(f"{what}: the system has no memory ({text}); close programs") from error
        if any(phrase in low for phrase in _NO_DEVICE):
            raise RuntimeUnavailableError(
                f"{what}: the GPU or its driver can't be used ({text}); update the card's driver, or leave "
                f"{argument('device')} out"
            ) from error
        if any(phrase in low for phrase in _NO_OPERATOR):
            raise UnsupportedModelError(
                f"{what}: this onnxruntime lacks an operator ({text}); update onnxruntime, or choose another device"
            ) from error
        raise ModelFormatError(f"{what}: onnxruntime says: {text}; export the model again") from error


def _check_signature(session: Any, export: Export) -> None:
    """Refuse a graph whose inputs and outputs are not those of an export of our own."""
    inputs = {node.name: node.shape for node in session.get_inputs()}
    outputs = {node.name: node.shape for node in session.get_outputs()}
    expected = {"input_ids", "position_ids", "seqlens_k", "total_sequence_length", "attention_bias"}
    expected |= {"logit_rows", "attention_rows", "attn_on", "mlp_on", "tap_rows"}
    expected |= {"attention_bias_local"} if export.local_layers else set()
    caches = [f"{name}_{i}" for i in range(export.n_layer) for name in ("key", "value")]
    expected |= {f"past_{name}" for name in caches}
    returned = {"logits", *(f"hidden_{i}" for i in range(export.n_layer)), *(f"present_{name}" for name in caches)}
    if inputs.keys() != expected or outputs.keys() != returned:
        other = sorted((inputs.keys() ^ expected) | (outputs.keys() ^ returned))
        raise ModelFormatError(
            f"{export.graph}: its inputs and outputs are not those of an export (among others {other[0]!r}); "
            "export the model again with this edgedec"
        )
    cache = [export.n_head_kv, export.head_dim]
    wrong = [name for name in caches if inputs[f"past_{name}"][1::2] != cache]
    if wrong or outputs["logits"][-1] != export.n_vocab or outputs["hidden_0"][-1] != export.n_embd:
        raise ModelFormatError(f"{export.graph}: its sizes are not those of edgedec.json; export the model again")


def read_foreign(session: Any, export: Export) -> Contract:
    """Return the sizes of an opened graph that optimum made.

    Raises:
        UnsupportedModelError: The graph has other inputs and outputs than optimum gives a decoder.
        ModelFormatError: The sizes are not those of edgedec.json.
    """
    ports = [
        [Port(node.name, node.type, tuple(node.shape)) for node in nodes]
        for nodes in (session.get_inputs(), session.get_outputs())
    ]
    try:
        contract = read_contract(*ports)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{export.graph}: {error}") from error
    shape = (contract.n_layer, contract.n_head_kv, contract.head_dim, contract.n_vocab or export.n_vocab)
    if shape != (export.n_layer, export.n_head_kv, export.head_dim, export.n_vocab):
        raise ModelFormatError(f"{export.graph}: its sizes are not those of edgedec.json; export the model again")
    return contract


def _require_used(session: Any, chosen: ChosenProvider, export: Export) -> None:
    """Raise RuntimeUnavailableError for a provider that leaves the whole graph to the CPU."""
    assigned = {part.ep_name for part in session.get_provider_graph_assignment_info()}
    if chosen.provider.name not in assigned:
        raise RuntimeUnavailableError(
            f"{export.graph}: {chosen.provider.name} takes no part of this graph, so that all of it would run on the "
            f"CPU; leave {argument('device')} out, or export for that device (--target)"
        )
