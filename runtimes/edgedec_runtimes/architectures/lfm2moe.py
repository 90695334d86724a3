"""LFM2's mixtures of experts, such as LFM2-8B-A1B: only the first layers have a feed-forward block.

A router takes the sigmoid of each score, as DeepSeek-V3 does (arXiv:2412.19437): a bias for each expert is added to
choose, and the weights of the chosen experts have no bias.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import EXPERT_CHOICE_BIAS, Switches
from edgedec_runtimes.architectures.experts import EXPERT_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.lfm2 import LFM2


def _switches(header: Header) -> Switches:
    return mixed(header, LFM2.switches(header), normed=True, gating="sigmoid")


LFM2MOE = replace(
    LFM2,
    switches=_switches,
    keys=LFM2.keys | EXPERT_KEYS | {"leading_dense_block_count"},
    vectors=LFM2.vectors | {EXPERT_CHOICE_BIAS},
)
