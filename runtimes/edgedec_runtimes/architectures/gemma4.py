"""Gemma 4 (Google 2026), the text model: layers that see everything have longer heads.

In small models the last layers read the keys and values of layers before, and each layer gets something of the token
beside the hidden state, as in Gemma 3n. Large ones may have a mixture of experts beside a feed-forward block.
"""

import math
from dataclasses import replace

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec_runtimes.architectures.architecture import (
    EXPERT_NORMS,
    INPUT_NORMS,
    PER_LAYER,
    POST_NORMS,
    QK_NORMS,
    Architecture,
    Switches,
)
from edgedec_runtimes.architectures.experts import EXPERT_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import LLAMA3_DIVISORS, Rope
from edgedec_runtimes.shared.hyperparameters import CROSS, OF_TARGET, LayerShape, positive

SHARED = "gemma4.attention.shared_kv_layers"
"""The key of how many of the last layers have no keys and values."""
_PERIOD = 6


class AllOfTarget(int):
    """A value of SHARED, of no file: the layers are a draft head's, and all of them read its target's."""


def _layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers: by whether they see a window, and those of the last ones without keys."""
    said, sliding = header.hyper.layers, header.sliding_layers(_PERIOD) or (False,) * header.hyper.n_layer
    of_target = isinstance(header.gguf.metadata.get(SHARED), AllOfTarget)
    n_own = 0 if of_target else len(said) - header.whole("attention.shared_kv_layers", 0)
    key = "attention.key_length_swa"
    narrow = positive(header.gguf, key, header.whole(key, said[0].head_dim))
    if header.whole("attention.value_length_swa", narrow) != narrow:
        raise UnsupportedModelError(
            f"{header.gguf.paths[0]}: keys and values of a layer's window differ in length; use the llamacpp runtime"
        )
    newest: dict[bool, int] = {False: OF_TARGET, True: OF_TARGET} if of_target else {}
    role = CROSS if of_target else "all"
    layers = []
    for number, (layer, slides) in enumerate(zip(said, sliding, strict=True)):
        if number < n_own:
            newest[slides] = number
        if slides not in newest:
            raise ModelFormatError(
                f"{header.gguf.paths[0]}: layer {number} has no keys and values, and no layer of its kind before it "
                "has some; download the file again"
            )
        layers.append(replace(layer, head_dim=narrow if slides else layer.head_dim, kv_from=newest[slides], role=role))
    return tuple(layers)


def _switches(header: Header) -> Switches:
    n = header.hyper
    sliding = header.sliding_layers(_PERIOD)
    if not all(sliding or [False]) and LLAMA3_DIVISORS not in header.gguf.tensors:
        raise ModelFormatError(
            f"{header.gguf.paths[0]}: it has no tensor {LLAMA3_DIVISORS!r}, by which layers rotate that see "
            "everything; download the file again"
        )
    narrow = next((layer.head_dim for layer, slides in zip(n.layers, sliding, strict=False) if slides), n.n_rot)
    switches = Switches(
        rope=Rope(n.n_rot, n.rope_base),
        attention_scale=1.0,
        activation="gelu",
        embedding_scale=math.sqrt(n.n_embd),
        logit_softcap=header.number("final_logit_softcapping", 30.0),
        sliding_window=header.info.sliding_window,
        sliding=sliding,
        rope_sliding=Rope(
            header.whole("rope.dimension_count_swa", narrow),
            header.number("rope.freq_base_swa", 10000.0),
            has_divisors=False,
        ),
        value_norm=True,
    )
    return mixed(header, switches, normed=True) if n.n_expert else switches


GEMMA4 = Architecture(
    _switches,
    keys=EXPERT_KEYS.union(
        """
        attention.key_length_swa attention.value_length_swa attention.shared_kv_layers attention.sliding_window
        attention.sliding_window_pattern embedding_length_per_layer_input final_logit_softcapping
        rope.dimension_count_swa rope.freq_base_swa
        """.split()
    ),
    vectors=frozenset({"layer_output_scale.weight", LLAMA3_DIVISORS}),
    needed=INPUT_NORMS | POST_NORMS | QK_NORMS | PER_LAYER | EXPERT_NORMS,
    layers=_layers,
    ignored=("v.", "a.", "mm.", "vision.", "audio."),
)
