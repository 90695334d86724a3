"""Nemotron 3 of NVIDIA: a Nemotron-H whose feed-forward layers are mixtures of experts, with a shared one.

A router takes the sigmoid of each score, and a bias for each expert is added only to choose.
"""

from dataclasses import replace

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.architectures.architecture import EXPERT_CHOICE_BIAS, Switches
from edgedec_runtimes.architectures.experts import SHARED_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.nemotron_h import NEMOTRON_H


def _switches(header: Header) -> Switches:
    if (n_groups := header.whole("expert_group_count", 0)) > 1:
        raise UnsupportedModelError(
            f"{header.gguf.paths[0]}: its experts are chosen by groups, {n_groups} of them; use the llamacpp runtime"
        )
    normed = header.flag("expert_weights_norm", default=False)
    return mixed(header, NEMOTRON_H.switches(header), normed=normed, gating="sigmoid")


NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    switches=_switches,
    keys=NEMOTRON_H.keys
    | SHARED_KEYS
    | {"expert_group_count", "expert_group_used_count", "expert_shared_count", "expert_weights_norm"}
    | {"expert_weights_scale"},
    vectors=NEMOTRON_H.vectors | {EXPERT_CHOICE_BIAS},
)
