"""LFM2 of Liquid AI (2025): most layers have a gated short convolution in place of attention."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import CONVOLUTION, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS


def _switches(header: Header) -> Switches:
    return replace(plain(header), convolution_length=header.whole("shortconv.l_cache", 0))


LFM2 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"shortconv.l_cache"},
    vectors=QK_NORMS | CONVOLUTION,
    renamed={"token_embd_norm.weight": "output_norm.weight"},
    is_hybrid=True,
)
