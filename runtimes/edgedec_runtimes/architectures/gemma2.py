"""Gemma 2 (arXiv:2408.00118): scores and logits are soft-capped, and every other layer sees a window."""

import math
from dataclasses import replace

from edgedec_runtimes.architectures.architecture import POST_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header

_PERIOD = 2
_LAYERS_OF_27B = 46


def _switches(header: Header) -> Switches:
    n = header.hyper
    # The 27B divides by the root of n_embd / n_head, which is not the length of its heads.
    scaled_by = n.n_embd // n.n_head if n.n_layer == _LAYERS_OF_27B else n.head_dim
    return replace(
        plain(header),
        activation="gelu",
        embedding_scale=math.sqrt(n.n_embd),
        attention_scale=scaled_by**-0.5,
        attention_softcap=header.number("attn_logit_softcapping", 50.0),
        logit_softcap=header.number("final_logit_softcapping", 30.0),
        sliding_window=header.info.sliding_window,
        sliding=header.sliding_layers(_PERIOD),
    )


GEMMA2 = Architecture(
    _switches,
    keys=frozenset(
        """
        attn_logit_softcapping final_logit_softcapping attention.sliding_window attention.sliding_window_pattern
        """.split()
    ),
    vectors=POST_NORMS,
)
