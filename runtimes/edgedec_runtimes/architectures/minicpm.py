"""MiniCPM 1 to 4 of OpenBMB (arXiv:2404.06395): a Llama with scales for embeddings, half-layers and logits.

Files from before 2025 leave the scales out, and llama.cpp takes others for the logits then than the model's own code.
Such a file is refused.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Architecture, Switches
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.llama import LLAMA
from edgedec_runtimes.architectures.rope import LONG_DIVISORS, SHORT_DIVISORS


def _switches(header: Header) -> Switches:
    return replace(
        LLAMA.switches(header),
        embedding_scale=header.number("embedding_scale"),
        scaled_vectors=True,
        residual_scale=header.number("residual_scale"),
        logit_scale=1 / (header.number("logit_scale") or 1.0),
    )


MINICPM = Architecture(
    _switches,
    keys=LLAMA.keys | {"embedding_scale", "logit_scale", "residual_scale"},
    vectors=LLAMA.vectors | {SHORT_DIVISORS, LONG_DIVISORS},
)
