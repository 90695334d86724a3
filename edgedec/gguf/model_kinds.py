"""What kind of model a GGUF holds: refusing one that is no text decoder by its name, and how an embedding model pools.

The architectures' names are those of llama.cpp (llama-arch.cpp, gguf-py's constants) and, for image, video and speech
models, those that the tools around ComfyUI, stable-diffusion.cpp and whisper.cpp write.
"""

from pathlib import Path
from typing import Literal, get_args

from edgedec.errors import EdgedecError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_header_of
from edgedec.gguf.metadata import get_array, get_bool, get_int, get_text, refuse_missing
from edgedec.gguf.values import ValueType

Pooling = Literal["mean", "cls", "last"]
"""What a text's vector is: the mean of its hidden states, or that of its first or of its last token."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_OF_NUMBER: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's enum llama_pooling_type

_FILE_TYPES = {
    "adapter": "a LoRA adapter, which changes another model",
    "mmproj": "the vision or audio encoder (mmproj) of a multimodal model",
    "clip-vision": "the vision encoder of a multimodal model",
    "imatrix": "an importance matrix, an input to quantization",
}

_ENCODER = "an embedding or reranker model (an encoder)"
_TWO_PARTS = "an encoder-decoder model"
_DIFFUSION_TEXT = "a diffusion language model, which does not write left to right"
_DENOISING = frozenset({"dream", "llada", "llada-moe", "rnd1"})
_DRAFT_HEAD = "a draft head, which works only on top of its own target model"
_IMAGE = "an image or video generation model"
_SPEECH_ARCHITECTURES = ("whisper", "parler-tts", "kokoro", "dia", "snac", "qwen3tts", "pockettts")
_IMAGE_ARCHITECTURES = tuple(
    """
    sd1 sd2 sd3 sdxl flux flux2 aura hidream cosmos ltxv ltx2 hyvid wan lumina2 qwen_image z_image pig vae
    """.split()
)

_ARCHITECTURES = {
    "clip": "the vision or audio encoder (mmproj) of a multimodal model",
    "controlvector": "a control vector, which steers another model",
    "t5": _TWO_PARTS,
    "t5encoder": _ENCODER,
    "gemma-embedding": _ENCODER,
    "llama-embed": _ENCODER,
    **dict.fromkeys(("eagle3", "dflash", "dflash-draft", "gemma4-assistant"), _DRAFT_HEAD),
    "wavtokenizer-dec": "a vocoder, which turns audio codes into sound",
    **dict.fromkeys(_SPEECH_ARCHITECTURES, "a speech model"),
    **dict.fromkeys(_IMAGE_ARCHITECTURES, _IMAGE),
}

POOLING_RANK = 4  # the pooling type of a model with a head that scores a text
# Beginnings of tensor names in files whose metadata does not say what the files are.
_TENSOR_PREFIXES = {
    "model.diffusion_model.": _IMAGE,
    "first_stage_model.": _IMAGE,
    "double_blocks.": _IMAGE,
    "joint_blocks.": _IMAGE,
    "cond_stage_model.": _IMAGE,
    "direction.": "a control vector, which steers another model",
    "v.blk.": "the vision encoder of a multimodal model",
    "a.blk.": "the audio encoder of a multimodal model",
}
_TENSOR_SUFFIXES = {
    ".lora_a": "a LoRA adapter, which changes another model",
    ".in_sum2": "an importance matrix, an input to quantization",
}
_NO_TOKENIZER = frozenset({"none", "no_vocab"})


def is_embedder(gguf: GGUF) -> bool:
    """Return whether a file holds a model that was trained to embed or compare texts, not to write them."""
    architecture = get_text(gguf, "general.architecture")
    if architecture is None:
        return False
    sees_all = get_bool(gguf, f"{architecture}.attention.causal") is False and not denoises(gguf)
    return _is_encoder(architecture) or sees_all or read_pooling(gguf, architecture) is not None


def denoises(gguf: GGUF) -> bool:
    """Return whether a file holds a diffusion language model: its rows say what stands at masked positions."""
    keys = ("diffusion.shift_logits", "diffusion.block_size", "diffusion.window_size")  # all but the first are ours
    return get_text(gguf, "general.architecture") in _DENOISING or any(key in gguf.metadata for key in keys)


def is_ranker(gguf: GGUF) -> bool:
    """Return whether a file says that its model was trained to rank documents."""
    architecture = get_text(gguf, "general.architecture")
    keys = (f"{architecture}.classifier.output_labels", "tokenizer.chat_template.rerank")
    return gguf.metadata.get(f"{architecture}.pooling_type") == POOLING_RANK or any(k in gguf.metadata for k in keys)


def embeds_only(path: Path) -> bool:
    """Return whether a model's file holds a model that was trained to embed or compare texts, not to write them."""
    try:
        return is_embedder(read_header_of(path))
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return False


def read_pooling(gguf: GGUF, architecture: str) -> Pooling | None:
    """Return how a model was trained to pool; None where its header does not say it."""
    number = get_int(gguf, f"{architecture}.pooling_type", at_least=-1, at_most=2**31 - 1)
    return None if number is None else _OF_NUMBER.get(number)


def number_of(pooling: Pooling) -> int:
    """Return the number that a GGUF has for a pooling."""
    return next(number for number, name in _OF_NUMBER.items() if name == pooling)


def _is_encoder(architecture: str) -> bool:
    """Return whether the models of an architecture see a whole text at once."""
    return "bert" in architecture or _ARCHITECTURES.get(architecture) == _ENCODER


def require_text_decoder(
    gguf: GGUF,
    *,
    may_embed: bool = False,
    may_encode: bool = False,
    may_denoise: bool = False,
    may_read_first: bool = False,
) -> None:
    """Raise an error unless the file holds a text decoder with its tokenizer.

    Args:
        may_embed: Whether it may be one that was trained to embed texts, not to write them.
        may_encode: Whether it may also be an encoder, which sees each text at once and embeds it or ranks it.
        may_denoise: Whether it may be a diffusion language model.
        may_read_first: Whether it may be an encoder-decoder model, which reads a whole prompt before it writes.

    Raises:
        UnsupportedModelError: The file holds something else, which the message names.
        ModelFormatError: A value that would say it has the wrong type, or nothing says what the file is.
    """
    runs = {_TWO_PARTS} if may_read_first else set[str]()
    kind = _other_kind(gguf, runs, may_embed=may_embed or may_encode, may_encode=may_encode, may_denoise=may_denoise)
    if kind is not None:
        remedy = "edgedec runs text decoders: pass the GGUF of a language model"
        if kind.startswith(_ENCODER):
            remedy = "the llamacpp runtime embeds texts or ranks documents with it: use that"
        if kind.startswith((_DIFFUSION_TEXT, _TWO_PARTS)):
            remedy = "the cpu runtime runs such models: use that, or the GGUF of another language model"
        raise UnsupportedModelError(f"{gguf.paths[0]}: this is {kind}; {remedy}")


def _other_kind(gguf: GGUF, runs: set[str], *, may_embed: bool, may_encode: bool, may_denoise: bool) -> str | None:
    """Return the name of what the file holds; None for a text decoder, and for what is among `runs`."""
    file_type = get_text(gguf, "general.type")
    if file_type in _FILE_TYPES:
        return _FILE_TYPES[file_type]
    if file_type not in (None, "model"):
        return f"a file of the type {file_type[:60]!r}"
    architecture = get_text(gguf, "general.architecture")
    if architecture is None:
        kind = _kind_by_tensors(gguf)
        return kind if kind is not None else refuse_missing(gguf, "general.architecture")
    if _is_encoder(architecture) and not may_encode:
        return f"{_ENCODER} (architecture {architecture[:60]!r})"
    if denoises(gguf) and not may_denoise:
        return f"{_DIFFUSION_TEXT} (architecture {architecture[:60]!r})"
    if architecture in _ARCHITECTURES and not _is_encoder(architecture) and _ARCHITECTURES[architecture] not in runs:
        return f"{_ARCHITECTURES[architecture]} (architecture {architecture})"
    if not gguf.tensors:
        return "a vocabulary without a model (it has no tensors)"
    return (
        _encoder_by_metadata(gguf, architecture, may_embed=may_embed, may_encode=may_encode)
        or _kind_by_tensors(gguf)
        or _kind_by_tokenizer(gguf)
    )


def _encoder_by_metadata(gguf: GGUF, architecture: str, *, may_embed: bool, may_encode: bool) -> str | None:
    pooling = get_int(gguf, f"{architecture}.pooling_type", at_least=-1, at_most=2**31 - 1)
    if pooling is not None and pooling > 0 and not (may_embed and pooling < POOLING_RANK) and pooling != POOLING_RANK:
        return f"an embedding model (architecture {architecture[:60]!r} with pooling type {pooling})"
    if get_bool(gguf, f"{architecture}.attention.causal") is False and not (may_encode or denoises(gguf)):
        return f"an encoder (architecture {architecture[:60]!r} without causal attention)"
    return None


def _kind_by_tensors(gguf: GGUF) -> str | None:
    if "token_embd.weight" in gguf.tensors:
        return None
    for name in gguf.tensors:
        for prefix, kind in _TENSOR_PREFIXES.items():
            if name.startswith(prefix):
                return kind
        for suffix, kind in _TENSOR_SUFFIXES.items():
            if name.endswith(suffix):
                return kind
    if "general.architecture" in gguf.metadata:
        return "a model without token embeddings (it has no tensor token_embd.weight)"
    return None


def _kind_by_tokenizer(gguf: GGUF) -> str | None:
    tokenizer = get_text(gguf, "tokenizer.ggml.model")
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    if tokenizer is None or tokenizer in _NO_TOKENIZER:
        return "a model without a tokenizer"
    if tokens is None or not len(tokens):
        return "a model without a vocabulary (tokenizer.ggml.tokens is missing or empty)"
    return None
