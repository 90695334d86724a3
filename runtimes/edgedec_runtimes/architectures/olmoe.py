"""OLMoE (arXiv:2409.02060): 8 of 64 experts a token, and one norm for the queries or keys of all heads."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import INPUT_NORMS, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.experts import EXPERT_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS


def _switches(header: Header) -> Switches:
    return mixed(header, replace(plain(header), wide_norms=True), normed=False)


OLMOE = Architecture(_switches, keys=SCALING_KEYS | EXPERT_KEYS, needed=INPUT_NORMS | QK_NORMS)
