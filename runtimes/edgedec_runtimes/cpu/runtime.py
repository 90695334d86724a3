"""The cpu runtime: runs GGUFs with kernels of our own."""

import ctypes
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from edgedec.errors import EdgedecError, OptionError, RequestError, UnsupportedModelError, argument, counted
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions, default_n_ctx
from edgedec.memory.system import resident_bytes, return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import check_cancelled, report_progress
from edgedec.runtime import RuntimeReport
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.architectures.rope import divisor_tensor
from edgedec_runtimes.cpu import kv_types, prefetch, weights
from edgedec_runtimes.cpu.adapters import adapter_terms, attach_adapters
from edgedec_runtimes.cpu.draft_head.weights import CpuDraftHead, borrowed_rows, output_bytes, output_type
from edgedec_runtimes.cpu.encoder_model import ENCODER_CAPABILITIES, ENCODERS, CpuEncoder, state_term
from edgedec_runtimes.cpu.library import (
    ARITHMETIC,
    KERNEL_ROWS,
    KV_TYPES,
    check,
    forced_instruction_set,
    instruction_sets,
    native,
)
from edgedec_runtimes.cpu.model import CAPABILITIES, CpuModel
from edgedec_runtimes.cpu.native_tables import NUMBERS
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.cpu.options import CpuOptions, cpu_options
from edgedec_runtimes.cpu.source_model import SOURCE_CAPABILITIES, CpuSourceModel
from edgedec_runtimes.cpu.state_memory import prompt_terms, scratch_floats, state_terms
from edgedec_runtimes.cpu.tiles.cache import Job, Tiles, can_be_mapped, open_tiles
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles
from edgedec_runtimes.cpu.tiles.streaming import MEASURED_BYTES, StreamPlan
from edgedec_runtimes.shared.cards import methods_of, model_card, row_count, rows_together
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.final_norm import read_final_norm
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION, RECURRENT
from edgedec_runtimes.shared.load_checks import check_sizes
from edgedec_runtimes.tokenizer import open_tokenizer
from edgedec_runtimes.tokenizer.metadata import read_vocabulary
from edgedec_runtimes.trained_heads.kind import NAME as TRAINED

_VOCABULARY_BYTES, _VOCABULARY_BYTES_PER_TOKEN = 5_000_000, 75  # of the code, and of each token
_BLOCK = 32


class Cpu:
    """Implements edgedec.runtime.Runtime."""

    name = "cpu"
    own_options = CpuOptions

    def accepts(self, path: Path) -> str | None:
        """Return None when architecture, tensor types and vocabulary are covered, else the reason why they are not."""
        try:
            _read(path)
            native()
        except EdgedecError as error:
            return str(error)
        return None

    def draft_head_kinds(self, path: Path) -> tuple[str, ...]:
        """Return the kinds of heads, which can follow every model that the runtime runs."""
        return (TRAINED,)

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan, from the header."""
        _check_options(options)
        gguf, network = _read(path)
        _check_kv(path, network, options)
        n_ctx, job = options.n_ctx or default_n_ctx(network.n_ctx_train), weights.tile_job(gguf, network, options)
        streamed = weights.stream_plan(job, network, options.resident_bytes)
        in_file = job.mapped and can_be_mapped(job)
        # The header and the vocabulary that the plan is made from take most of the room.
        most = MEASURED_BYTES if options.planning_bytes is None else options.planning_bytes // 8
        held = weights.weights_term(job, streamed, in_file=in_file, n_threads=options.n_threads, most_bytes=most)
        n_rows = (row_count(gguf, options.max_rows), _together(gguf, network, n_ctx))
        adapters = adapter_terms(options, network, path)
        terms = _terms(held, adapters, network, options, n_ctx, n_rows, resident_bytes() or 0)
        return (*terms, *_head_terms(gguf, options)(n_ctx))

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load the weights: map their tiles, which are made first where they are not on the disk."""
        _check_options(options)
        before = resident_bytes() or 0
        _report(path, options, 0)
        whole = read_gguf(path)  # while it is held, nothing parses the file again
        gguf, network = _read(path)
        _check_kv(path, network, options)
        of_head = _head_terms(gguf, options)  # before the tiles, as the next lines: all may refuse
        of_adapters = adapter_terms(options, network, path)
        tokenizer = open_tokenizer(whole)
        return_free_memory()  # building the tokenizer's tables took some 150 bytes a token
        with ExitStack() as undo:
            n_ctx = options.n_ctx or default_n_ctx(network.n_ctx_train)
            together = _together(gguf, network, n_ctx)
            handle = weights.create(network, options.n_threads or usable_cores(), together)
            undo.callback(native().ec_model_destroy, handle)
            job = weights.tile_job(gguf, network, options)
            streamed = weights.stream_plan(job, network, options.resident_bytes)
            if streamed is not None and options.planning_bytes is None:  # no plan has measured it
                streamed.memory_rate(options.n_threads or usable_cores())  # before the weights take their memory
            tiles = open_tiles(job) if streamed is None else weights.stream_tiles(job, streamed)
            undo.callback(tiles.close)
            weights.set_weights(handle, gguf, network, tiles, n_ctx)
            adapters = attach_adapters(handle, read_gguf(path), network, options)
            check(native().ec_model_finish(handle), str(path))
            isa = native().ec_model_instruction_set(handle).decode()
            in_memory = {} if streamed is not None else weights.bytes_by_type(network)
            n_threads = options.n_threads or usable_cores()
            prefetch.set_up(handle, cpu_options(options).prefetch, isa, in_memory, n_threads, options)
            job.sha256 = tiles.header.model_sha256 if tiles.path is not None else job.sha256
            head = _open_head(handle, job, network, options, n_ctx)
            if head is not None:
                undo.callback(head.close)
            check_cancelled(options.cancel, f"loading {path.name}")
            rope = divisor_tensor(gguf, network.switches.rope, n_ctx) or ""
            numerics = (isa, options.kv_type, rope, *adapters.sha256)
            card = _card(gguf, network, tiles.header.model_sha256, " ".join(filter(None, numerics)))
            card = replace(card, adapters=adapters.names)
            held = _held_weights(job, streamed, tiles, options.n_threads)

            least = row_count(gguf, 1)

            @lru_cache(maxsize=8)
            def terms(n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:  # must not hold on to the header
                rows = (max(n_rows, least), together)
                return (*_terms(held, of_adapters, network, options, n_ctx, rows, before), *of_head(n_ctx))

            kind, can = _kind(network, card)
            logit_rows, kv_type = max(options.max_rows, least), KV_TYPES[options.kv_type]
            model = kind(handle, tiles, tokenizer, card, can, kv_type, terms, logit_rows, together)
            model.adapters = adapters
            if isinstance(model, CpuEncoder):
                model.norm = read_final_norm(path)
            model.has_places = bool(network.switches.rope.sections)
            if options.prompt_cache_bytes and options.cache_dir is not None:
                model.keeping = (options.cache_dir, card.name, options.prompt_cache_bytes)
            if head is not None:
                model.follow_with(head)
            undo.pop_all()
        _report(path, options, 100)
        return model

    @property
    def is_fastest(self) -> bool:
        """Whether the kernels are those of AVX2 or AVX-512, which docs/figures.md compares with llama.cpp's."""
        return (forced_instruction_set() or instruction_sets()[0].encode()).startswith(b"avx")

    def report(self) -> RuntimeReport:
        """Return edgedec's version, the instruction sets that the kernels use, and how far ahead they fetch weights."""
        from edgedec import __version__

        sets = instruction_sets()
        used = (forced_instruction_set() or sets[0].encode()).decode()
        fetching = prefetch.described(prefetch.stored_settings(cache_folder(), used, usable_cores()))
        return RuntimeReport(__version__, ("CPU",), (f"instruction sets: {', '.join(sets)}", fetching))


def _kind(network: Network, card: ModelCard) -> tuple[type[CpuModel], Capabilities]:
    """Return the class of a network's model, and what its sessions can do."""
    if network.is_encoder:
        return CpuEncoder, ENCODER_CAPABILITIES
    if network.n_source:
        return CpuSourceModel, SOURCE_CAPABILITIES
    reads = not network.n_per_layer  # else layers also read the tokens
    can = replace(CAPABILITIES, hidden_input=reads, vector_rows=reads, attention_mass=network.most_heads)
    return CpuModel, replace(can, groups=_takes_groups(network), keeps_prompts=can.keeps_prompts and not card.methods)


def _report(path: Path, options: LoadOptions, percent: int) -> None:
    """Report that a load begins or ends; the long parts in between report their own progress."""
    report_progress(options.on_progress, "load", percent, 100, "%", path.name)


def _read(path: Path) -> tuple[GGUF, Network]:
    gguf = read_gguf(path)
    may_encode = get_text(gguf, "general.architecture") in ENCODERS
    require_text_decoder(gguf, may_embed=True, may_encode=may_encode, may_denoise=True, may_read_first=True)
    network = read_network(gguf)
    read_vocabulary(gguf)  # refuses one that is not covered
    methods_of(gguf)
    return usual_tensors(gguf, network), network


def _check_options(options: LoadOptions) -> None:
    """Raise RequestError for options that the runtime can't honour."""
    if options.kv_type not in KV_TYPES:
        raise OptionError("kv_type", options.kv_type, f"the cpu runtime takes {', '.join(KV_TYPES)}")
    if options.n_gpu_layers not in (None, 0, -1) or options.device not in (None, "CPU", "auto"):
        raise RequestError(
            f"the cpu runtime has no GPU; leave {argument('device')} and {argument('n_gpu_layers')} out, or use the "
            "llamacpp runtime"
        )
    if (wish := cpu_options(options).prefetch) != "auto":
        prefetch.parse(wish)
    check_sizes(options)


def _check_kv(path: Path, network: Network, options: LoadOptions) -> None:
    reason = kv_types.refusal(network, options.kv_type)
    if reason is not None:
        raise RequestError(f"{path}: {reason}")


def _card(gguf: GGUF, network: Network, model_sha256: str, numerics: str) -> ModelCard:
    identity = f"cpu {weights.LAYOUT} {ARITHMETIC} {gguf.header_hash} {model_sha256} {numerics}"
    return model_card(Cpu.name, gguf, network, hashlib.sha256(identity.encode()).hexdigest())


def _terms(
    held: MemoryTerm,
    adapters: tuple[MemoryTerm, ...],
    network: Network,
    options: LoadOptions,
    n_ctx: int,
    n_rows: tuple[int, int],
    base_bytes: int,
) -> tuple[MemoryTerm, ...]:
    """Return the terms of the memory plan.

    Args:
        held: The term of the weights.
        network: The sizes of the model.
        options: How the model is loaded.
        n_ctx: Tokens of a session.
        n_rows: Rows of logits, and most rows of a forward.
        base_bytes: What the process held before loading.
    """
    n, n_tokens = network, -(-n_ctx // 64) * 64
    of_rows = NUMBERS["EC_CUT_ROWS"] * max(layer.n_q + 2 * layer.n_head for layer in n.layers)
    of_spans = 4 * min(NUMBERS["EC_MOST_KEPT"], of_rows * (n_ctx // 128 + 1))  # as attention.cpp allocates it
    kv_bytes = n_tokens * kv_types.token_bytes(network, options.kv_type)
    of_source = " of source and text" if n.n_source and not n.is_encoder else ""
    logits = MemoryTerm("logits", n_rows[0] * n.n_vocab * 4, counted(n_rows[0], "row"))
    return (
        MemoryTerm("interpreter and libraries", base_bytes, "measured", base=True),
        held,
        MemoryTerm("vocabulary", _VOCABULARY_BYTES + n.n_vocab * _VOCABULARY_BYTES_PER_TOKEN, f"{n.n_vocab} tokens"),
        MemoryTerm(
            "KV cache",
            kv_bytes * options.n_parallel,
            f"{counted(n_ctx, 'token')}{of_source} × {options.n_parallel}",
            grows=True,
        ),
        *_column_terms(network, n_ctx, options.n_parallel),
        *prompt_terms(network, options, n_ctx),
        *state_terms(network, options.n_parallel, n_rows[0]),
        *adapters,
        state_term(network, n_ctx) if n.is_encoder else logits,
        MemoryTerm("activations", _scratch_bytes(n, n_rows[1]), f"{n_rows[1]} rows"),
        MemoryTerm("sums of attention", of_spans, "kept by threads for one another", grows=True),
    )


def _column_terms(network: Network, n_ctx: int, n_parallel: int) -> tuple[MemoryTerm, ...]:
    """Return the line of what short convolutions keep of the text; none where the model has no such layers."""
    n_bytes = kv_types.column_bytes(network, n_ctx) * n_parallel
    detail = f"{counted(network.n_with(CONVOLUTION), 'layer')} of {network.n_layer} × {n_parallel}"
    return (MemoryTerm("columns of convolutions", n_bytes, detail, grows=True),) if n_bytes else ()


def _together(gguf: GGUF, network: Network, n_ctx: int) -> int:
    """Return the most rows of one forward: those of an encoder's source come all together, with one behind them."""
    return max(rows_together(gguf, KERNEL_ROWS, n_ctx), min(network.n_source, n_ctx) + 1)


def _takes_groups(network: Network) -> bool:
    """Return whether rows of one session may pass different layers in one forward."""
    return not (network.n_with(CONVOLUTION) or network.n_with(RECURRENT))


def _held_weights(
    job: Job, streamed: StreamPlan | None, tiles: Tiles | StreamedTiles, n_threads: int | None
) -> MemoryTerm:
    """Return the term of the weights that were loaded."""
    if isinstance(tiles, StreamedTiles):
        return weights.weights_term(job, streamed, in_file=True, n_threads=n_threads)
    return weights.weights_term(job, streamed, in_file=tiles.file is not None, held_as=tiles.held_as)


def _open_head(
    handle: ctypes.c_void_p, job: Job, network: Network, options: LoadOptions, n_ctx: int
) -> CpuDraftHead | None:
    """Return the head that the options name, arranged for the native model of `job`; None where they name none."""
    if options.draft_head is None:
        return None
    from edgedec.gguf.layer_bytes import layer_bytes
    from edgedec_runtimes.trained_heads.load import load_head
    from edgedec_runtimes.trained_heads.target import fit

    gguf, path = job.gguf, job.gguf.paths[0]
    if network.n_source:
        raise UnsupportedModelError(f"{path}: a model with an encoder takes no draft head; load it without one")
    fitted = fit(load_head(options.draft_head), read_gguf(path))  # the header whose hashes are known already
    card, read = fitted.head.card, layer_bytes(path)
    if card.splits_forwards and (network.n_per_layer or not _takes_groups(network)):
        raise UnsupportedModelError(
            f"the draft head {card.name} has rows of one forward pass different layers, which they can't where layers "
            "have states or read tokens; take another head, or none"
        )
    rows, below_bytes = partial(borrowed_rows, gguf), int(read.halves[: card.split_layer].sum())
    output, target = _shared_output(gguf, options), replace(job, tiles_only=False, on_progress=None)
    of_model = {"below_bytes": below_bytes, "n_ctx": n_ctx}
    head = CpuDraftHead(handle, fitted, rows, read.total, **of_model, shared_output=output, of_target=target)
    del fitted
    return_free_memory()
    return head


def _head_terms(gguf: GGUF, options: LoadOptions) -> Callable[[int], tuple[MemoryTerm, ...]]:
    """Return the terms of the draft head by the tokens of a session; they don't hold on to the header."""
    if options.draft_head is None:
        return lambda n_ctx: ()
    from edgedec_runtimes.cpu.draft_head.memory import head_facts, head_terms

    facts = head_facts(options.draft_head)
    is_shared = facts.layers is not None and _shared_output(gguf, options) is not None
    n_output = 0 if is_shared else output_bytes(facts.card, output_type(gguf))
    n_scratch = 0 if facts.layers is None else _scratch_bytes(facts.layers)
    of_layers = (MemoryTerm("activations of the draft head", n_scratch, f"{KERNEL_ROWS} rows"),) if n_scratch else ()
    return lambda n_ctx: (*head_terms(facts, n_output, n_ctx, options.n_parallel), *of_layers)


def _shared_output(gguf: GGUF, options: LoadOptions) -> GGMLType | None:
    """Return the type of the output matrix, of which a head can read rows in place; None where it may be streamed."""
    return output_type(gguf) if options.resident_bytes is None else None


def _scratch_bytes(n: Network, n_rows: int = KERNEL_ROWS) -> int:
    """Return the bytes that native/forward/model.cpp allocates for forwards."""
    n_q = max(layer.n_q for layer in n.layers)
    n_qkv = max(layer.n_q * (2 if n.switches.attention_gate else 1) + 2 * layer.n_kv for layer in n.layers)
    n_convolved = n.n_embd if n.n_with(CONVOLUTION) else 0
    n_entering = n.n_embd if n.switches.early_router else 0
    floats = scratch_floats(n) + 2 * n.n_embd + n_entering + n_q + max(n_qkv, 3 * n_convolved) + 2 * n.n_rot
    floats += (2 * n.n_layer + 1) * n.n_per_layer + (n.n_embd if n.n_expert and n.n_ff_shared else 0)
    quantized = (n.n_embd + n_entering + n_q + n_convolved + n.n_per_layer) * (1 + 20 / _BLOCK)
    widest = max(map(n.dense_width, range(n.n_layer)))
    slots = n_rows * n.n_expert_used + 7 * (n.n_expert + n_rows * n.n_expert_used // 64)
    experts = slots * n.n_ff_expert * (1 + 20 / _BLOCK)
    routing = n.n_layer * n_rows * (1 + 4 * n.n_expert_used) * 4 + n_rows * (n.n_expert + 1) * 4
    dense = n_rows * (4 * floats + quantized + widest * (1 + 20 / _BLOCK))
    return int(dense + (experts + routing if n.n_expert else 0))
