"""The text models of Qwen2-VL and Qwen2.5-VL (arXiv:2409.12191): a Qwen2 with sections in its rotation."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.qwen2 import QWEN2
from edgedec_runtimes.architectures.rope import SECTIONS


def _switches(header: Header) -> Switches:
    switches = QWEN2.switches(header)
    return replace(switches, rope=replace(switches.rope, woven=False))


QWEN2VL = replace(QWEN2, switches=_switches, keys=QWEN2.keys | {SECTIONS})
