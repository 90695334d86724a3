"""Granite 3 and 4 of IBM, the dense models: a Llama with scales for embeddings, half-layers, scores and logits."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import LLAMA3_DIVISORS, LONG_DIVISORS, SCALING_KEYS, SHORT_DIVISORS


def _switches(header: Header) -> Switches:
    start = plain(header)
    is_rotated = header.flag("rope.scaling.finetuned", default=True)  # models without positions say False
    return replace(
        start,
        rope_interleaved=True,
        embedding_scale=header.number("embedding_scale", 1.0) or 1.0,
        scaled_vectors=True,
        residual_scale=header.number("residual_scale", 1.0) or 1.0,
        logit_scale=1 / (header.number("logit_scale") or 1.0),
        attention_scale=header.number("attention.scale", 0.0) or start.attention_scale,
        unrotated=() if is_rotated else (True,) * header.hyper.n_layer,
    )


GRANITE = Architecture(
    _switches,
    keys=SCALING_KEYS | {"attention.scale", "embedding_scale", "logit_scale", "residual_scale"},
    vectors=frozenset({LLAMA3_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS}),
)
