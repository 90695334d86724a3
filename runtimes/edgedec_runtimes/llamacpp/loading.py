"""Loads a GGUF with llama.cpp: its parameters, the load itself, and the dry run that a memory plan is made from."""

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec.errors import (
    CancelledError,
    MemoryCapError,
    OptionError,
    RequestError,
    UnsupportedModelError,
    argument,
)
from edgedec.load_options import LoadOptions
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import n_split
from edgedec.progress import report_progress
from edgedec_runtimes.llamacpp.context import ContextOptions, context_params
from edgedec_runtimes.llamacpp.devices import device_array
from edgedec_runtimes.llamacpp.library import captured_log, last_complaint, llama
from edgedec_runtimes.llamacpp.options import llamacpp_options
from edgedec_runtimes.llamacpp.trial import repack_complaint
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.load_checks import check_sizes, refuse_adapters, refuse_draft_head

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
_N_FORKS = 3
_MOST_LAYERS = 1 << 16
_MMAP, _COPY = 1, 0
_BY_LAYER = 1  # llama_split_mode
_MIB = 2**20

# llama.cpp has one log for the whole process, so loads, which read the log, run one at a time.
_load_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class DryRun:
    """What llama.cpp would allocate for a model and one context, in bytes.

    Attributes:
        kv_bytes: The KV cache, or the recurrent state.
        output_bytes: The rows of logits.
        compute_bytes: The activations of the largest graph.
        repacks: Whether weights would be rearranged into private memory.
    """

    kv_bytes: int
    output_bytes: int
    compute_bytes: int
    repacks: bool


def checked_options(options: LoadOptions) -> LoadOptions:
    """Return the options, without rearranged weights where llama.cpp's kernels for them end the process.

    Raises:
        RequestError: llama.cpp does not take a value.
    """
    if options.kv_type not in KV_TYPES:
        raise OptionError("kv_type", options.kv_type, f"the llamacpp runtime takes {', '.join(KV_TYPES)}")
    llamacpp_options(options)
    refuse_draft_head(options, "llamacpp")
    if llamacpp_options(options).machines:
        refuse_adapters(options, "llamacpp runtime with other machines")
    if options.resident_bytes is not None:
        raise RequestError(
            f"the llamacpp runtime maps all weights; leave {argument('resident_bytes')} out, or use the cpu runtime"
        )
    # Beyond these bounds llama.cpp crashes (threads), looks for memory for minutes (context), or takes numbers modulo
    # 2^32.
    check_sizes(options)
    if not -1 <= (options.n_gpu_layers or 0) <= _MOST_LAYERS:
        raise OptionError("n_gpu_layers", options.n_gpu_layers, f"it must be from -1 to {_MOST_LAYERS}")
    if repack_complaint() is None:
        return options
    return replace(options, runtime_options={**options.runtime_options, "repack": False})


def context_options(model: Any, options: LoadOptions, n_cells: int, *, embeds: bool = False) -> ContextOptions:
    """Return how to make a model's contexts of `n_cells` tokens, for final states in place of logits if it `embeds`.

    Trees and forks need sequence ids beside those of the sessions. A recurrent model gets none for them, as it would
    hold a state for each id.
    """
    api = llama()
    recurrent = api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model)
    spare = 0 if recurrent or options.max_rows == 1 else _N_FORKS + options.max_rows
    n_sequences = 1 if embeds else options.n_parallel + spare
    if options.n_parallel <= (n_most := int(api.llama_max_parallel_sequences())):
        n_sequences = min(n_sequences, n_most)  # fewer leaves and forks; rows of a chain need no id of their own
    return ContextOptions(
        n_cells=n_cells,
        n_sequences=n_sequences,
        logit_rows=options.max_rows,
        n_threads=options.n_threads or usable_cores(),
        type_k=KV_TYPES[options.kv_type],
        type_v=KV_TYPES[options.kv_type],
        flash_attention=llamacpp_options(options).flash_attention,
        embeds=embeds,
    )


@contextmanager
def _model_params(options: LoadOptions) -> Iterator[Any]:
    """Yield llama.cpp's parameters of a model; what they point to lives until the block ends."""
    api = llama()
    params = api.llama_model_default_params()
    params.use_extra_bufts = llamacpp_options(options).repack
    params.load_mode = _MMAP if llamacpp_options(options).mmap else _COPY
    if options.n_gpu_layers is not None:
        params.n_gpu_layers = options.n_gpu_layers
    if options.layer_split is not None:
        params.n_gpu_layers = n_split(options.layer_split)
        shares = (ctypes.c_float * api.llama_max_devices())(*(float(n) for _, n in options.layer_split))
        params.split_mode, params.tensor_split = _BY_LAYER, shares
        names = [name for name, _ in options.layer_split]
    else:
        shares, names = None, [] if options.device is None else [options.device]
    devices = device_array(names)
    if names or options.layer_split is not None:
        params.devices = ctypes.addressof(devices)
    yield params
    del devices, shares


def load(path: Path, options: LoadOptions) -> Any:
    """Load the weights and return llama.cpp's handle.

    Raises:
        CancelledError: options.cancel was set.
        UnsupportedModelError: llama.cpp refuses the file; the message holds its reason.
        MemoryCapError: There is no memory for the weights.
    """
    api = llama()
    raised: list[BaseException] = []

    def on_progress(fraction: float, _user_data: Any) -> bool:
        try:
            report_progress(options.on_progress, "load", int(fraction * 100), 100, "%", path.name)
        except BaseException as error:  # of the application's callback; raised again behind the C frames
            raised.append(error)
            return False
        return options.cancel is None or not options.cancel.cancelled

    with _load_lock, captured_log(), _model_params(options) as params:
        callback = type(params.progress_callback)(on_progress)
        params.progress_callback = callback
        handle = api.llama_model_load_from_file(os.fsencode(path), params)
        complaint = last_complaint()
    if handle:
        return handle
    if raised:
        raise raised[0]
    if options.cancel is not None and options.cancel.cancelled:
        raise CancelledError(f"loading {path.name}: cancelled")
    if "alloc" in complaint or "memory" in complaint:
        raise MemoryCapError(f"no memory for {path.name}: llama.cpp says: {complaint}; try a smaller model")
    raise UnsupportedModelError(f"llama.cpp does not load {path}: {complaint}; try another file of this model")


def dry_run(path: Path, options: LoadOptions, n_ctx: int, *, embeds: bool = False) -> DryRun:
    """Let llama.cpp load a model and make a context of `n_ctx` tokens without allocating weights or KV.

    The context is for final states in place of logits if the model `embeds`.

    llama.cpp says the sizes in its log only; they are read from lines as the tested release writes them.

    Raises:
        UnsupportedModelError: llama.cpp refuses the file.
    """
    api = llama()
    with _load_lock, captured_log() as lines, _model_params(options) as params:
        params.no_alloc = True
        params.load_mode = _COPY
        model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise UnsupportedModelError(f"llama.cpp does not load {path}: {last_complaint()}")
        try:
            chosen = context_options(model, options, n_ctx * (1 if embeds else options.n_parallel), embeds=embeds)
            context = api.llama_init_from_model(model, context_params(chosen))
            if not context:
                raise UnsupportedModelError(f"llama.cpp makes no context for {path}: {last_complaint()}")
            api.llama_free(context)
        finally:
            api.llama_model_free(model)
            return_free_memory()
    return DryRun(
        kv_bytes=_logged(lines, r"(?:kv_cache|recurrent|memory_\w+).*?: size = +([\d.]+) MiB"),
        output_bytes=_logged(lines, r"output buffer size = +([\d.]+) MiB"),
        compute_bytes=_logged(lines, r"compute buffer size = +([\d.]+) MiB"),
        repacks=any("REPACK model buffer size" in line for line in lines),
    )


def _logged(lines: list[str], pattern: str) -> int:
    matches = [match for line in lines if (match := re.search(pattern, line))]
    return int(sum(float(match[1]) for match in matches) * _MIB)
