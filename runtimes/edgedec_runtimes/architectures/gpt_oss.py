"""gpt-oss of OpenAI (arXiv:2508.10925): experts with biases and bounded gates, attention sinks, windows by turns."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import (
    BIASES,
    EXPERT_BIASES,
    INPUT_NORMS,
    OUTPUT_BIAS,
    SINKS,
    Architecture,
    Switches,
    plain,
)
from edgedec_runtimes.architectures.experts import EXPERT_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS

_PERIOD = 2
_LIMIT, _SLOPE = 7.0, 1.702


def _switches(header: Header) -> Switches:
    return replace(
        mixed(header, plain(header), normed=False, gating="chosen"),
        glu_limit=_LIMIT,
        glu_slope=_SLOPE,
        sliding_window=header.info.sliding_window,
        sliding=header.sliding_layers(_PERIOD),
    )


GPT_OSS = Architecture(
    _switches,
    keys=SCALING_KEYS | EXPERT_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern"},
    needed=INPUT_NORMS | BIASES | EXPERT_BIASES | {OUTPUT_BIAS, SINKS},
    renamed={"post_attention_norm.weight": "ffn_norm.weight"},
)
