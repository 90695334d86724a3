"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv:2407.10671): beside 60 or 64 experts, all tokens go through a shared one."""

from edgedec_runtimes.architectures.architecture import BIASES, Architecture, Switches, plain
from edgedec_runtimes.architectures.experts import SHARED_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS


def _switches(header: Header) -> Switches:
    return mixed(header, plain(header), normed=False)


QWEN2MOE = Architecture(_switches, keys=SCALING_KEYS | SHARED_KEYS, vectors=BIASES)
