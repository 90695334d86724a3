"""Qwen3-Next (2025), such as Qwen3-Next-80B-A3B: as Qwen3.5's mixtures, with neighbouring heads on the same key."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.experts import SHARED_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.qwen35 import DELTA_KEYS, QWEN35, delta_switches


def _switches(header: Header) -> Switches:
    return mixed(header, delta_switches(header, tiled=False), normed=True)


QWEN3NEXT = replace(QWEN35, switches=_switches, keys=DELTA_KEYS | SHARED_KEYS)
