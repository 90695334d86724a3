"""Gemma 3 (arXiv:2503.19786), the text model: five of six layers see a window, and rotate with a base of their own."""

import math
from dataclasses import replace

from edgedec_runtimes.architectures.architecture import POST_NORMS, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS, Rope

_PERIOD = 6
_LAYERS_OF_27B = 62


def _switches(header: Header) -> Switches:
    n = header.hyper
    base = header.number("rope.freq_base_swa", 10000.0)
    # The 27B divides by the root of n_embd / n_head, which is not the length of its heads.
    scaled_by = n.n_embd // n.n_head if n.n_layer == _LAYERS_OF_27B else n.head_dim
    return replace(
        plain(header),
        activation="gelu",
        embedding_scale=math.sqrt(n.n_embd),
        attention_scale=scaled_by**-0.5,
        sliding_window=header.info.sliding_window,
        sliding=header.sliding_layers(_PERIOD),
        rope_sliding=Rope(n.n_rot, base, has_divisors=False),
    )


GEMMA3 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"},
    vectors=QK_NORMS | POST_NORMS,
)
