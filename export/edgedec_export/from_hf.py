"""Convert a Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors) to GGUF; torch is not needed.

    convert("checkpoint/", "model.gguf")            # keeps the types of the tensors
    convert("checkpoint/", "model.gguf", "Q8_0")

The architectures are llama, qwen2, qwen3, qwen3moe, gemma3, granite, olmo2, smollm3 and, for vectors of texts, bert.
Tensors are streamed. A checkpoint with a setting that GGUF cannot express is refused.
"""

from collections.abc import Mapping
from pathlib import Path

from edgedec.errors import ModelFormatError, ModelNotFoundError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_kinds import number_of
from edgedec.gguf.tensor_types import FILE_TYPE_NAMES, GGMLType
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.gguf_writer import Metadata, OutTensor, decoder_metadata, new_file, write_gguf
from edgedec_export.hf.bert import bert_parts, pooling_of_modules
from edgedec_export.hf.config import Config, read_config
from edgedec_export.hf.tensors import gguf_tensors
from edgedec_export.hf.tokenizer import tokenizer_entries
from edgedec_runtimes.weights.safetensors import open_checkpoint, read_json

TYPES: Mapping[str, GGMLType | None] = {
    "KEEP": None,
    "F32": GGMLType.F32,
    "F16": GGMLType.F16,
    "BF16": GGMLType.BF16,
    "Q8_0": GGMLType.Q8_0,
}
"""By name, the type that matrices are converted to; KEEP stands for the types of the checkpoint."""

_QUANTIZATION_VERSION = 2  # of ggml's block layouts


def convert(
    folder: str | Path,
    out: str | Path,
    type_name: str = "KEEP",
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Write a GGUF made from a checkpoint, and return its path.

    Args:
        folder: Holds config.json, tokenizer.json and the safetensors, of which a few MB are in memory at a time.
        out: The file to write; it appears when it is complete.
        type_name: A name of `TYPES`, in any case, for the matrices; vectors become F32. For Q8_0 a matrix keeps its
            type where the length of its rows is not a multiple of 32.
        force: Replace `out` where it exists.

    Raises:
        RequestError: There is no such type, or `out` may not be written.
        ModelNotFoundError: A file of the checkpoint is missing.
        ModelFormatError: A file is damaged, or two files contradict each other.
        UnsupportedModelError: The architecture, one of its settings, or the tokenizer cannot be converted.
        StorageError: The checkpoint cannot be read, or the result cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    folder, out = Path(folder), Path(out)
    if type_name.upper() not in TYPES:
        raise RequestError(f"type {type_name!r}: expected one of {', '.join(TYPES)}; export_gguf can make other types")
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder}: there is no such folder; pass the folder that holds config.json")
    architecture, tensors, entries = _parts(folder, TYPES[type_name.upper()])
    entries = _file_entries(architecture, folder, tensors) | entries
    with new_file(out, force=force) as part:
        write_gguf(part, entries, tensors, on_progress=on_progress, cancel=cancel)
        if len(read_gguf(part).tensors) != len(tensors):
            raise ModelFormatError(f"{part}: tensors are missing from the converted file; convert the checkpoint again")
    return out


def _parts(folder: Path, matrix_type: GGMLType | None) -> tuple[str, list[OutTensor], Metadata]:
    """Return the architecture of a checkpoint, the tensors of its GGUF, and the metadata that is not of every GGUF."""
    if read_json(folder / "config.json").get("model_type") == "bert":
        return "bert", *bert_parts(folder, open_checkpoint(folder), matrix_type)
    config = read_config(folder)
    tensors = gguf_tensors(open_checkpoint(folder), config, matrix_type, folder)
    entries = _entries(config) | tokenizer_entries(folder, config.n_vocab, config.token_ids) | sampling_entries(folder)
    if config.denoising is not None and "tokenizer.ggml.mask_token_id" not in entries:
        raise ModelFormatError(
            f"{folder}: no mask_token_id in config.json and no mask_token in tokenizer_config.json says which token "
            "stands for a masked position; add it to one of them"
        )
    if (pooling := pooling_of_modules(folder)) is not None:
        entries[f"{config.architecture}.pooling_type"] = number_of(pooling)
    return config.architecture, tensors, entries


def _file_entries(architecture: str, folder: Path, tensors: list[OutTensor]) -> Metadata:
    """Return the metadata that every GGUF has."""
    kinds = [tensor.type for tensor in tensors if len(tensor.shape) > 1]
    most = max(set(kinds), key=kinds.count).name
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": folder.absolute().name,
        "general.file_type": next(number for number, name in FILE_TYPE_NAMES.items() if name == most),
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


def _entries(config: Config) -> Metadata:
    """Return the metadata of a decoder's shape."""
    c, prefix = config, config.architecture
    entries = decoder_metadata(prefix, c, n_layer=c.n_layer, n_ctx=c.n_ctx_train, n_rot=c.head_dim)
    if prefix == "llama":
        entries[f"{prefix}.vocab_size"] = c.n_vocab
    if c.rope_factor != 1:
        entries[f"{prefix}.rope.scaling.type"] = "linear"
        entries[f"{prefix}.rope.scaling.factor"] = c.rope_factor
    if c.sliding_window:
        entries[f"{prefix}.attention.sliding_window"] = c.sliding_window
        entries[f"{prefix}.rope.freq_base_swa"] = c.rope_base_sliding
    if c.n_expert:
        entries[f"{prefix}.expert_count"] = c.n_expert
        entries[f"{prefix}.expert_used_count"] = c.n_expert_used
        entries[f"{prefix}.expert_feed_forward_length"] = c.n_ff_expert
    if c.denoising is not None:
        # The keys of sizes are edgedec's own; the others are llama.cpp's.
        entries["diffusion.shift_logits"] = c.denoising.shift
        if c.denoising.window is not None:
            entries["diffusion.window_size"] = c.denoising.window
        elif c.denoising.block is None:
            entries[f"{prefix}.attention.causal"] = False
        else:
            entries["diffusion.block_size"] = c.denoising.block
    return entries | {f"{prefix}.{key}": value for key, value in c.scales.items()}


_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_WHOLE = "top_k"


def sampling_entries(folder: Path) -> Metadata:
    """Return the recommended values; none where there is no such file, or it asks for greedy decoding.

    Raises:
        ModelFormatError: The file is damaged, or a value is no number from 0 up.
    """
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    if config.get("do_sample") is False:
        return {}
    entries: Metadata = {}
    for name, key in _KEYS.items():
        value = config.get(name)
        if value is None:
            continue
        kind = int if name == _WHOLE else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelFormatError(f"{path}: {name} is {value!r:.40}; it must be a number from 0 up")
        entries[key] = value if name == _WHOLE else float(value)
    return entries
