"""A Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors) as a GGUF, without torch and transformers.

    convert("checkpoint/", "model.gguf")            # the types as they are
    convert("checkpoint/", "model.gguf", "Q8_0")

Converted are llama, qwen2, qwen3 and gemma3; tensors are streamed. What a GGUF could not say is refused.
"""

from collections.abc import Mapping
from pathlib import Path

from edgedec.errors import ModelFormatError, ModelNotFoundError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import FILE_TYPE_NAMES, GGMLType
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.gguf_writer import Entry, OutTensor, new_file, real_number, text, whole_number, write_gguf
from edgedec_export.hf.config import Config, read_config
from edgedec_export.hf.safetensors import open_checkpoint
from edgedec_export.hf.tensors import gguf_tensors
from edgedec_export.hf.tokenizer import tokenizer_entries

TYPES: Mapping[str, GGMLType | None] = {
    "KEEP": None,
    "F32": GGMLType.F32,
    "F16": GGMLType.F16,
    "BF16": GGMLType.BF16,
    "Q8_0": GGMLType.Q8_0,
}
"""What matrices can become; KEEP for the types that the checkpoint has."""

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
        folder: Where config.json, tokenizer.json and the safetensors are; read are a few MB of them at a time.
        out: The file to write; it appears when it is complete.
        type_name: A name of `TYPES`, in any case. Vectors are always F32; rows that are no whole blocks of 32 keep
            their type where Q8_0 is asked for.
        force: Replace `out` where it exists.

    Raises:
        RequestError: No such type, or `out` cannot be the result's name.
        ModelNotFoundError: A file of the checkpoint is missing.
        ModelFormatError: One is damaged, or they contradict each other.
        UnsupportedModelError: The architecture, a switch of it or its tokenizer is not converted.
        StorageError: The checkpoint cannot be read, or the result not be written.
        CancelledError: `cancel` said so.
    """
    folder, out = Path(folder), Path(out)
    if type_name.upper() not in TYPES:
        raise RequestError(f"type {type_name!r}: expected one of {', '.join(TYPES)}; export_gguf makes others of these")
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder}: there is no such folder; pass the one that config.json is in")
    config = read_config(folder)
    tensors = gguf_tensors(open_checkpoint(folder), config, TYPES[type_name.upper()], folder)
    entries = _entries(config, folder, tensors) + tokenizer_entries(folder, config.n_vocab, config.token_ids)
    with new_file(out, force=force) as part:
        write_gguf(part, entries, tensors, on_progress=on_progress, cancel=cancel)
        if len(read_gguf(part).tensors) != len(tensors):
            raise ModelFormatError(f"{part}: not all tensors are there; convert the checkpoint again")
    return out


def _entries(config: Config, folder: Path, tensors: list[OutTensor]) -> list[Entry]:
    """Return the metadata, but for the vocabulary."""
    c, prefix = config, config.architecture
    kinds = [tensor.type for tensor in tensors if len(tensor.shape) > 1]
    most = max(set(kinds), key=kinds.count).name
    file_type = next(number for number, name in FILE_TYPE_NAMES.items() if name == most)
    entries = [
        ("general.architecture", text(prefix)),
        ("general.type", text("model")),
        ("general.name", text(folder.absolute().name)),
        ("general.file_type", whole_number(file_type)),
        ("general.quantization_version", whole_number(_QUANTIZATION_VERSION)),
        (f"{prefix}.block_count", whole_number(c.n_layer)),
        (f"{prefix}.context_length", whole_number(c.n_ctx_train)),
        (f"{prefix}.embedding_length", whole_number(c.n_embd)),
        (f"{prefix}.feed_forward_length", whole_number(c.n_ff)),
        (f"{prefix}.attention.head_count", whole_number(c.n_head)),
        (f"{prefix}.attention.head_count_kv", whole_number(c.n_head_kv)),
        (f"{prefix}.attention.key_length", whole_number(c.head_dim)),
        (f"{prefix}.attention.value_length", whole_number(c.head_dim)),
        (f"{prefix}.attention.layer_norm_rms_epsilon", real_number(c.rms_epsilon)),
        (f"{prefix}.rope.dimension_count", whole_number(c.head_dim)),
        (f"{prefix}.rope.freq_base", real_number(c.rope_base)),
    ]
    if prefix == "llama":
        entries.append((f"{prefix}.vocab_size", whole_number(c.n_vocab)))
    if c.rope_factor != 1:
        entries.append((f"{prefix}.rope.scaling.type", text("linear")))
        entries.append((f"{prefix}.rope.scaling.factor", real_number(c.rope_factor)))
    if c.sliding_window:
        entries.append((f"{prefix}.attention.sliding_window", whole_number(c.sliding_window)))
        entries.append((f"{prefix}.rope.freq_base_swa", real_number(c.rope_base_sliding)))
    return entries
