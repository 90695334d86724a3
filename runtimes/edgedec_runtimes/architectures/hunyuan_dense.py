"""Hunyuan of Tencent, the dense models of 2025 (0.5B to 7B): heads are normalized after their rotation."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import INPUT_NORMS, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS


def _switches(header: Header) -> Switches:
    return replace(plain(header), norms_after_rope=True)


HUNYUAN_DENSE = Architecture(_switches, keys=SCALING_KEYS, needed=INPUT_NORMS | QK_NORMS)
