"""Phi 3 and Phi 4 mini (arXiv:2404.14219, arXiv:2503.01743): fused matrices, and LongRoPE's divisors of frequencies.

All layers see the sliding window that a file names (2,047 tokens of the 4k models, 262,144 of the 128k ones), as in the
models' own code. llama.cpp ignores the window, so that its logits differ from ours behind it.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import LONG_DIVISORS, SCALING_KEYS, SHORT_DIVISORS


def _switches(header: Header) -> Switches:
    window = header.info.sliding_window
    return replace(plain(header), sliding_window=window, sliding=(True,) * header.hyper.n_layer if window else ())


PHI3 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"attention.sliding_window"},
    vectors=frozenset({SHORT_DIVISORS, LONG_DIVISORS}),
)
