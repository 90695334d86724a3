"""Gemma 4's assistants as draft heads: GGUFs of the architecture `gemma4-assistant`, as llama.cpp writes them.

An assistant's layers have no keys and values: they see those that the target's last layers of their kind see, with a
window or without one. A matrix joins the target's embedding of a token and its state one position before, after its
last norm; another one makes of the assistant's own state what stands in its place when drafting goes on. The tensors
`masked_embd_*`, by which transformers scores some clusters of tokens alone, are left out, as in llama.cpp.
"""

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from edgedec.gguf.file import GGUF, Value
from edgedec.gguf.metadata import get_text
from edgedec_runtimes.architectures.gemma4 import SHARED, AllOfTarget
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.gguf_values import HeadFile
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.nextn import n_listed
from edgedec_runtimes.trained_heads.shapes import checked_head

ARCHITECTURE = "gemma4-assistant"
TENSORS = {"joint": "nextn.pre_projection.weight", "fc": "nextn.post_projection.weight", "output": "token_embd.weight"}
"""The names of an assistant's matrices beside its layers, by the names of edgedec_runtimes.trained_heads.head."""
_LEFT_OUT = ("masked_embd_centroids.weight", "masked_embd_ordering", "masked_embd_ordering.weight")
_OF_LAYERS = "gemma4"
# Settings that llama.cpp's graph of an assistant does not read.
_UNREAD = frozenset(
    """
    attention.shared_kv_layers embedding_length_out embedding_length_per_layer_input final_logit_softcapping
    nextn_predict_layers
    """.split()
)


def read_assistant(gguf: GGUF) -> Head:
    """Return the head that a GGUF holds.

    Raises:
        ModelFormatError: The file is damaged, or contradicts itself.
        UnsupportedModelError: A key or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: The file can't be read, or there is no memory for it.
    """
    file = HeadFile(gguf, ARCHITECTURE)
    record, n_target = file.record(), file.whole("embedding_length_out")
    if missing := [name for name in TENSORS.values() if name not in gguf.tensors]:
        file.fail(f"it has no tensor {missing[0]!r}")
    layers = _layers_alone(gguf, file.whole("block_count"))
    network = read_network(layers)
    first, n_vocab = network.layers[0], network.n_vocab
    if network.switches.sliding_window == 1:
        file.refuse("attention.sliding_window", "1, which leaves nothing to see")
    card = HeadCard(
        name=record.name or get_text(gguf, "general.name") or file.path.stem,
        n_embd=network.n_embd,
        n_embd_target=n_target,
        n_ff=first.n_ff,
        n_head=first.n_head,
        n_head_kv=first.n_head_kv,
        head_dim=first.head_dim,
        rms_epsilon=network.rms_epsilon,
        rope_base=network.rope_base,
        taps=(),
        n_vocab_draft=n_vocab,
        n_vocab_target=n_vocab,
        feeds_back_normed=True,
        own_output=True,
        target=record.target,
        promise=record.promise,
        joins=True,
        reads_target=True,
    )
    tensors = {part: file.weight(name) for part, name in TENSORS.items()}
    head = checked_head(file.path, card, tensors, np.arange(n_vocab), n_taps=1, layers=layers)
    return head.shortened(n_listed(gguf, n_vocab))


def _layers_alone(gguf: GGUF, n_layer: int) -> GGUF:
    """Return the header of a gemma4 whose `n_layer` layers all read the keys and values of another model."""
    metadata: dict[str, Value] = {"general.architecture": _OF_LAYERS}
    for name, value in gguf.metadata.items():
        prefix, _, rest = name.partition(".")
        if prefix == ARCHITECTURE and rest not in _UNREAD:
            metadata[f"{_OF_LAYERS}.{rest}"] = value
        elif prefix != ARCHITECTURE:
            metadata.setdefault(name, value)
    metadata |= {SHARED: AllOfTarget(n_layer), f"{_OF_LAYERS}.final_logit_softcapping": 0.0}
    beside = {TENSORS["joint"], TENSORS["fc"], *_LEFT_OUT}
    tensors = {name: tensor for name, tensor in gguf.tensors.items() if name not in beside}
    return replace(gguf, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors))


def misfit(layers: GGUF, target: GGUF) -> str | None:
    """Return why a model's layers don't keep the keys and values that an assistant's layers see; None where they do.

    Args:
        layers: Head.layers of an assistant.
        target: The model.

    Raises:
        UnsupportedModelError, ModelFormatError: The cpu runtime does not run the model.
    """
    architecture = get_text(target, "general.architecture") or "unknown"
    if architecture != _OF_LAYERS:
        return f"its layers see keys and values of a {_OF_LAYERS}, but the model is a {architecture[:40]}"
    head, others = read_network(layers), read_network(target)
    for number, layer in enumerate(head.layers):
        slides = head.switches.slides(number)
        kind = f"with{'' if slides else 'out'} a window"
        same = [shape for i, shape in enumerate(others.layers) if others.switches.slides(i) == slides]
        if not same:
            return f"its layer {number} is one {kind}, but the model has none"
        actual, expected = (f"{shape.n_head_kv} x {shape.head_dim} numbers" for shape in (same[-1], layer))
        if actual != expected:
            return f"its layer {number} sees keys of {expected}, but the model's layers {kind} have {actual}"
    return None
