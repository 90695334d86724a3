"""The llamacpp runtime: runs any GGUF that llama.cpp loads, on its CPU and GPU back ends."""

import hashlib
import platform
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from edgedec.errors import EdgedecError, counted
from edgedec.gguf.file import GGUF, GGUFArray, read_gguf
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.model_kinds import is_embedder, read_pooling, require_text_decoder
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions, default_n_ctx
from edgedec.memory.system import resident_bytes
from edgedec.memory_plan import HOST, Device, IsOver, MemoryPlan, MemoryTerm, Split, format_bytes
from edgedec.model import Model
from edgedec.model_card import ModelCard
from edgedec.processor import machine_name
from edgedec.runtime import RuntimeReport
from edgedec_runtimes.child.model import ChildModel, Hosting
from edgedec_runtimes.child.rows import process_term, shared_terms
from edgedec_runtimes.llamacpp.context import open_adapters
from edgedec_runtimes.llamacpp.device_terms import (
    HostRun,
    compute_bytes,
    default_split,
    kv_terms,
    layer_of,
    n_rearranged,
    server_terms,
    weight_terms,
)
from edgedec_runtimes.llamacpp.devices import device_names, devices
from edgedec_runtimes.llamacpp.encoder import LlamaCppEncoder, uses_word_pieces
from edgedec_runtimes.llamacpp.library import how_to_install, how_to_mend, installed, llama, version
from edgedec_runtimes.llamacpp.loading import DryRun, checked_options, context_options, dry_run, load
from edgedec_runtimes.llamacpp.model import LlamaCppModel
from edgedec_runtimes.llamacpp.options import LlamaCppOptions, is_apart, llamacpp_options, of_this_machine
from edgedec_runtimes.llamacpp.rpc.library import connect, rpc_note
from edgedec_runtimes.llamacpp.rpc.patience import Patience
from edgedec_runtimes.llamacpp.rpc.server import hosting
from edgedec_runtimes.llamacpp.rpc.servers import rpc_devices
from edgedec_runtimes.llamacpp.trial import choice, complaint, repack_complaint
from edgedec_runtimes.shared.consistency import require_consistent
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.device_account import remember_drivers, with_account, with_measured_drivers
from edgedec_runtimes.shared.invariance import will_probe
from edgedec_runtimes.shared.layer_split import split_layers, whole_split
from edgedec_runtimes.shared.load_checks import refuse_adapters
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.pages import with_mappings
from edgedec_runtimes.tile_files.keeping import header_file, make_whole
from edgedec_runtimes.weights.adapter_pairs import content_hash
from edgedec_runtimes.weights.adapters import adapter_bytes

# Measured on vocabularies of 49,000 to 262,000 tokens, with and without merges.
_BYTES_PER_TOKEN, _BYTES_PER_MERGE = 180, 150
_BYTES_PER_PIECE = 25  # of our own tokenizer, which a BERT has beside llama.cpp's
_GRAPH_BYTES = 9_000_000
_LIBRARY_BYTES = 18_000_000  # in a process that has it for planning only: 11 MB, and what the dry run leaves
_PROBE_BYTES = 8_000_000  # 0 to 9 MB, as the allocator has it
# What a dry run takes at its peak, when llama.cpp reads the vocabulary: 1.3 to 1.6 times what the vocabulary takes
# later, and 13 to 18 MB for the library, the header and a graph.
_DRY_RUN, _DRY_RUN_BYTES = 1.6, 18_000_000
_REPACKED_X86 = {GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q2_K, GGMLType.IQ4_NL}
_REPACKED_ARM = _REPACKED_X86 | {GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.Q8_0}

# Hashes of headers that were found to be consistent: a load reads a header to accept, to plan and to load the file.
_consistent: deque[str] = deque(maxlen=16)


class LlamaCpp:
    """Implements edgedec.runtime.Runtime."""

    name = "llamacpp"
    own_options = LlamaCppOptions

    def accepts(self, path: Path) -> str | None:
        """Return None when llama.cpp is installed and may run the model, else the reason why it may not."""
        if not installed():
            return f"it needs a library of llama.cpp, and none is installed; {how_to_install()}"
        try:
            _read_runnable(path)
            crash = complaint()
        except EdgedecError as error:
            return str(error)
        return None if crash is None else f"its library can't be used on this machine: {crash}; {how_to_mend()}"

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan, from the header and a dry run on the host.

        Where options.planning_bytes leaves no room for a dry run, the terms are only those that the header gives, and
        marked as partial.
        """
        options = checked_options(options)
        gguf = _read_runnable(path)
        if (least := _least_terms(gguf, options)) is not None:
            return least
        options = _placed(options, gguf)
        n_ctx = options.n_ctx or default_n_ctx(describe(gguf).n_ctx_train or 0)
        return _terms(gguf, options, n_ctx, resident_bytes() or 0)

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load the weights, those for other machines and for Vulkan devices in a child."""
        options = checked_options(options)
        placed = _placed(options, _read_runnable(path))
        if not is_apart(placed):
            return _load(path, options)
        options = replace(placed, planning_bytes=None)  # the child plans nothing
        before = resident_bytes() or 0

        def terms(n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
            return _terms(_read_runnable(path), _with_rows(options, n_rows), n_ctx, before)

        if llamacpp_options(options).machines:
            return ChildModel(hosting(f"{__name__}:{load_connected.__name__}", path, options, terms))
        refuse_adapters(options, "llamacpp runtime, with its model in a process of its own,")
        return ChildModel(Hosting(f"{__name__}:{load_here.__name__}", path, options, terms))

    def devices(self, options: LoadOptions) -> tuple[Device, ...]:
        """Return the devices that layers can be put on, in llama.cpp's order; see edgedec.memory_plan.HasDevices.

        None are named where options.planning_bytes leaves no room for llama.cpp's library.
        """
        if options.planning_bytes is not None and options.planning_bytes < 2 * _DRY_RUN_BYTES:
            return ()
        llama()
        all_devices = (*rpc_devices(llamacpp_options(options).machines), *devices(options))
        return with_measured_drivers(all_devices, self.name, options.cache_dir)

    def split(self, names: Sequence[str], n_layers: int, is_over: IsOver, *, whole: bool) -> Split:
        """Return how many layers each device takes; see edgedec.memory_plan.HasDevices."""
        return whole_split(names, n_layers, is_over) if whole else split_layers(names, n_layers, is_over)

    def account(self, plan: MemoryPlan, options: LoadOptions) -> MemoryPlan:
        """Return the plan with what a load took on its devices, and keep what the drivers took; as it is with servers.

        An rpc-server answers only the program that it serves: the one that runs the model.
        """
        if llamacpp_options(options).machines:
            return plan
        accounted = with_account(plan, devices(options))
        remember_drivers(accounted, self.name, options.cache_dir)
        return accounted

    def report(self) -> RuntimeReport:
        """Return llama.cpp's version, its devices, what it was built with, and whether it has RPC."""
        features = re.findall(r"(\w+) = 1", llama().llama_print_system_info().decode(errors="replace"))
        chosen = choice()
        why = "" if chosen is None else f"the library of {chosen.release.distribution}, as {chosen.reason}"
        notes = [why, f"built with {' '.join(features)}", rpc_note()]
        if (crash := repack_complaint()) is not None:
            notes.append(f"weights are not rearranged, as llama.cpp's kernels for that can't be used here: {crash}")
        return RuntimeReport(version(), device_names(), tuple(notes))


def load_here(path: Path, options: LoadOptions) -> Model:
    """Load the weights in this process: a child, whose end is no other process's."""
    return _load(path, options)


def load_connected(path: Path, options: LoadOptions) -> Model:
    """Load the weights in this process, which ends when a server is lost: so only in a child."""
    patience = Patience()
    with patience.loading(options.on_progress) as report:
        connect(llamacpp_options(options).machines)
        return _load(path, replace(options, on_progress=report), patience.forward)


def _load(
    path: Path, options: LoadOptions, around: Callable[[int], AbstractContextManager[None]] | None = None
) -> Model:
    """Load the weights in this process; for `around` see ContextOptions."""
    make_whole(path, on_progress=options.on_progress, cancel=options.cancel)
    gguf = _read_runnable(path)
    llama()
    options = _placed(options, gguf)
    before = resident_bytes() or 0
    handle, mapped = with_mappings(gguf.paths, lambda: load(path, options))
    if is_embedder(gguf):
        refuse_adapters(options, "llamacpp runtime, for an embedding model,")
    adapters = open_adapters(handle, gguf, [path for path, _ in options.adapters])
    card = _card(handle, gguf, options)
    n_ctx = options.n_ctx or default_n_ctx(card.n_ctx_train)

    @lru_cache(maxsize=8)
    def terms(n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        return _terms(gguf, _with_rows(options, n_rows), n_ctx, before)

    if options.planning_bytes is not None:
        terms(n_ctx, options.max_rows)  # the plan's dry run is still known; another one later would take memory
    files = MappedFiles(gguf.paths, mapped) if llamacpp_options(options).mmap else None
    if is_embedder(gguf):
        embedding = context_options(handle, options, _embedding_context(gguf, n_ctx), embeds=True)
        return LlamaCppEncoder(handle, files, card, replace(embedding, around=around), terms, gguf)
    chosen = replace(context_options(handle, options, n_ctx), around=around, adapters=adapters)
    return LlamaCppModel(handle, files, card, chosen, options.n_parallel, terms, _kept_in(options))


def _read_runnable(path: Path) -> GGUF:
    """Return the header of a text decoder or of an embedding model; refuse one that would crash llama.cpp."""
    gguf = read_gguf(path)
    require_text_decoder(gguf, may_encode=True)
    if gguf.header_hash not in _consistent:  # a large vocabulary takes 0.2 s
        require_consistent(gguf)
        _consistent.append(gguf.header_hash)
    return gguf


def _placed(options: LoadOptions, gguf: GGUF) -> LoadOptions:
    """Return the options with the layers that llama.cpp puts on each device by itself, where none are named."""
    if options.layer_split is not None or options.n_gpu_layers == 0:
        return options
    all_devices = LlamaCpp().devices(options)
    if not all_devices:
        return options
    n_layers = describe(gguf).n_layer + 1
    return replace(options, layer_split=default_split(all_devices, options.n_gpu_layers, n_layers))


def _with_rows(options: LoadOptions, n_rows: int) -> LoadOptions:
    return replace(options, max_rows=n_rows)


def _card(handle: object, gguf: GGUF, options: LoadOptions) -> ModelCard:
    api = llama()
    info = describe(gguf)
    template = api.llama_model_chat_template(handle, None)
    return ModelCard(
        name=info.name,
        architecture=info.architecture,
        runtime="llamacpp",
        n_vocab=api.llama_vocab_n_tokens(api.llama_model_get_vocab(handle)),
        n_embd=api.llama_model_n_embd_out(handle) if is_embedder(gguf) else api.llama_model_n_embd(handle),
        n_layer=api.llama_model_n_layer(handle),
        n_ctx_train=api.llama_model_n_ctx_train(handle),
        fingerprint=_fingerprint(gguf, options),
        chat_template=template.decode("utf-8", errors="replace") if template else None,
        sampling_defaults=info.sampling_defaults,
        pooling=read_pooling(gguf, info.architecture),
        adapters=tuple(str(path) for path, _ in options.adapters),
    )


def _kept_in(options: LoadOptions) -> Path | None:
    """Return where it is kept which rows are exact; None with servers, which do not say with how many threads they run.

    The same address may have another program or another number of threads tomorrow, and then other bits.
    """
    return None if llamacpp_options(options).machines else options.cache_dir


def _fingerprint(gguf: GGUF, options: LoadOptions) -> str:
    n_threads = options.n_threads or usable_cores()
    chosen = llamacpp_options(options)
    numerics = f"{version()} {options.kv_type} {chosen.flash_attention} {chosen.repack} {n_threads}"
    split = "" if options.layer_split is None else f"{options.layer_split} "
    split = f"{split}{llamacpp_options(options).machines} " if llamacpp_options(options).machines else split
    device = f"{split}{options.n_gpu_layers} {options.device} {machine_name()}"
    device += "".join(f" {content_hash((path,))}" for path, _ in options.adapters)
    return hashlib.sha256(f"{_identity(gguf)} {numerics} {device}".encode()).hexdigest()


def _identity(gguf: GGUF) -> str:
    """Return a name of the weights that does not need reading them: header's hash, sizes and times of change."""
    return f"{gguf.header_hash} {[(state.n_bytes, state.mtime_ns) for state in gguf.states]}"


def _terms(gguf: GGUF, options: LoadOptions, n_ctx: int, base_bytes: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of the memory plan; `base_bytes` is what the process held before loading."""
    embeds = is_embedder(gguf)
    n_ctx = _embedding_context(gguf, n_ctx) if embeds else n_ctx
    sizes = _dry_run(gguf.paths[0], gguf.header_hash, _sizing_options(options), n_ctx, embeds=embeds)
    info, split = describe(gguf), options.layer_split or ()
    probes = not embeds and will_probe(_fingerprint(gguf, options), options.max_rows, _kept_in(options))
    run = HostRun(sizes.kv_bytes, sizes.compute_bytes, n_ctx * (1 if embeds else options.n_parallel), info.n_embd)
    compute = compute_bytes(run, split, info.n_layer)
    is_copied = sizes.repacks and llamacpp_options(options).mmap  # private weights are rearranged when they are read
    n_repacked = _repacked_bytes(gguf, n_rearranged(gguf, split)) if is_copied else 0
    kv_detail = f"{counted(n_ctx, 'token')} × {options.n_parallel}, {options.kv_type}"
    later = [
        *kv_terms(run, split, info.n_layer, kv_detail),
        _output_term(info, options, sizes, n_ctx if embeds else None),
        MemoryTerm("activations", compute.pop(HOST), "compute buffer"),
        *(MemoryTerm("activations", n_bytes, "compute buffer", device=name) for name, n_bytes in compute.items()),
        MemoryTerm("first run", _PROBE_BYTES if probes else 0, "what finding out which rows are bit-equal leaves"),
        *(shared_terms(info.n_vocab, options.max_rows) if is_apart(options) else ()),
    ]
    terms = [
        MemoryTerm("interpreter and libraries", base_bytes, "measured", base=True),
        *weight_terms(gguf, split, later, mmap=llamacpp_options(options).mmap),
        MemoryTerm("weights (repacked)", n_repacked, "a private copy"),
        MemoryTerm("vocabulary", _vocabulary_bytes(gguf), f"{info.n_vocab} tokens"),
        *later,
        MemoryTerm("activations", _GRAPH_BYTES, "graph"),
        *server_terms(split),
        MemoryTerm("adapters", sum(adapter_bytes(path, gguf) for path, _ in options.adapters), "float32 or float16"),
    ]
    if is_apart(options):
        terms += [process_term(), MemoryTerm("llama.cpp", _LIBRARY_BYTES, "in the process that plans")]
    return tuple(term for term in terms if term.n_bytes)


def _sizing_options(options: LoadOptions) -> LoadOptions:
    """Return the options without those that make no difference to a dry run on the host: these are None."""
    options = replace(of_this_machine(options), n_gpu_layers=None, device=None, layer_split=())
    return replace(options, n_ctx=None, planning_bytes=None, cache_dir=None, on_progress=None, cancel=None)


@lru_cache(maxsize=16)
def _dry_run(path: Path, _header_hash: str, options: LoadOptions, n_ctx: int, *, embeds: bool) -> DryRun:
    """Return the result of a dry run, an earlier one if there is one: a dry run takes memory, which may be short."""
    gguf = read_gguf(path)
    with nullcontext(path) if gguf.form is None else header_file(gguf) as file:
        return dry_run(file, options, n_ctx, embeds=embeds)


def _output_term(info: ModelInfo, options: LoadOptions, sizes: DryRun, n_embedded: int | None) -> MemoryTerm:
    """Return the term of what forwards return; `n_embedded` is the longest text of an embedding model, else None."""
    if n_embedded is None:
        return MemoryTerm("logits", sizes.output_bytes, counted(options.max_rows, "row"))
    n_bytes = 4 * n_embedded * (info.n_vocab + info.n_embd)  # measured: the room grows with the longest text so far
    return MemoryTerm("states", n_bytes, f"{counted(n_embedded, 'token')}, with llama.cpp's room for their logits")


def _embedding_context(gguf: GGUF, n_ctx: int) -> int:
    """Return the tokens of an embedding model's context: at most as many as there are positions."""
    return min(n_ctx, describe(gguf).n_ctx_train or n_ctx)


def _least_terms(gguf: GGUF, options: LoadOptions) -> tuple[MemoryTerm, ...] | None:
    """Return the terms that the header gives where there is no room for a dry run; None where there is room."""
    n_bytes = int(_DRY_RUN * _vocabulary_bytes(gguf)) + _DRY_RUN_BYTES
    if options.planning_bytes is None or n_bytes <= options.planning_bytes:
        return None
    detail = f"{describe(gguf).n_vocab} tokens; llama.cpp would take {format_bytes(n_bytes)} to say what else it needs"
    weights = weight_terms(gguf, (), (), mmap=llamacpp_options(options).mmap)
    return *weights, MemoryTerm("vocabulary", _vocabulary_bytes(gguf), detail, partial=True)


def _vocabulary_bytes(gguf: GGUF) -> int:
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    n_merges = len(merges) if isinstance(merges, GGUFArray) else 0
    n_bytes = _BYTES_PER_TOKEN + (_BYTES_PER_PIECE if uses_word_pieces(gguf) else 0)
    return describe(gguf).n_vocab * n_bytes + n_merges * _BYTES_PER_MERGE


def _repacked_bytes(gguf: GGUF, n_layers: int) -> int:
    """Return the bytes of the matrices that ggml rearranges for its fast kernels, which take rows in groups of 8.

    `n_layers` are the host's layers; the output matrix counts as the last of all.
    """
    is_arm, n_layer = platform.machine().lower() in ("aarch64", "arm64"), describe(gguf).n_layer
    types = _REPACKED_ARM if is_arm else _REPACKED_X86
    return sum(
        tensor.n_bytes
        for tensor in gguf.tensors.values()
        if tensor.type in types and len(tensor.shape) == 2 and tensor.shape[1] % 8 == 0 and "embd" not in tensor.name
        if layer_of(tensor.name, n_layer) < n_layers
    )
