"""SmolLM3 of Hugging Face (2025): a Llama in which every fourth layer does not rotate (NoPE, arXiv:2501.18795)."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import BIASES, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS

_UNROTATED_PERIOD = 4


def _switches(header: Header) -> Switches:
    return replace(plain(header), rope_interleaved=True, unrotated=header.every(_UNROTATED_PERIOD))


SMOLLM3 = Architecture(_switches, keys=SCALING_KEYS, vectors=BIASES)
