"""Qwen3.5's mixtures of experts, such as Qwen3.5-35B-A3B: 8 of 256 experts a token, and a shared one with a gate."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.experts import SHARED_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.qwen35 import QWEN35


def _switches(header: Header) -> Switches:
    return mixed(header, QWEN35.switches(header), normed=True)


QWEN35MOE = replace(QWEN35, switches=_switches, keys=QWEN35.keys | SHARED_KEYS)
