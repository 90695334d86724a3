"""Qwen3's mixtures of experts (arXiv:2505.09388), such as Qwen3-30B-A3B: 8 of 128 experts a token, none shared."""

from edgedec_runtimes.architectures.architecture import QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.experts import EXPERT_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS


def _switches(header: Header) -> Switches:
    return mixed(header, plain(header), normed=True)


QWEN3MOE = Architecture(_switches, keys=SCALING_KEYS | EXPERT_KEYS, vectors=QK_NORMS)
