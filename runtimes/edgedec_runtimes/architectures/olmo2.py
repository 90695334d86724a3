"""OLMo 2 (arXiv:2501.00656): norms behind the half-layers instead of before them, and one norm for all heads.

OLMo 3 has the same architecture; three of four of its layers see a window, and its positions are scaled elsewhere only.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import POST_NORMS, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS, Rope

_PERIOD = 4


def _switches(header: Header) -> Switches:
    n = header.hyper
    return replace(
        plain(header),
        wide_norms=True,
        sliding_window=header.info.sliding_window,
        sliding=header.sliding_layers(_PERIOD),
        rope_sliding=Rope(n.n_rot, n.rope_base),
    )


OLMO2 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern"},
    needed=QK_NORMS | POST_NORMS,
)
