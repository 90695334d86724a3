"""Granite 3's mixtures of experts: a Granite whose feed-forward blocks are experts, in some with a shared one."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.experts import SHARED_KEYS, mixed
from edgedec_runtimes.architectures.granite import GRANITE
from edgedec_runtimes.architectures.header import Header


def _switches(header: Header) -> Switches:
    return mixed(header, GRANITE.switches(header), normed=True)


GRANITEMOE = replace(GRANITE, switches=_switches, keys=GRANITE.keys | SHARED_KEYS)
