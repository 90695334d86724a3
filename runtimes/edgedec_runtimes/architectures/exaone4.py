"""EXAONE 4 of LG (arXiv:2507.11407): norms behind the half-layers and of each head.

In the 32B three of four layers see a window; the others see everything, and do not rotate. The 1.2B has no windows.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import POST_NORMS, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import LLAMA3_DIVISORS, SCALING_KEYS

_PERIOD = 4


def _switches(header: Header) -> Switches:
    sliding = header.sliding_layers(_PERIOD)
    return replace(
        plain(header),
        sliding_window=header.info.sliding_window,
        sliding=sliding,
        unrotated=tuple(not slides for slides in sliding),
    )


EXAONE4 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern"},
    vectors=frozenset({LLAMA3_DIVISORS}),
    needed=QK_NORMS | POST_NORMS,
)
