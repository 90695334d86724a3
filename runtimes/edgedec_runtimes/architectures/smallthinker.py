"""SmallThinker (arXiv:2507.20984): a layer's router reads what enters the layer, and gates go through ReLU.

Where a file names a sliding window, three of four layers see 4,096 tokens, whatever the file says; the others see
everything, and do not rotate.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Architecture, Switches, plain
from edgedec_runtimes.architectures.experts import EXPERT_KEYS, mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS

_PERIOD, _WINDOW = 4, 4096


def _switches(header: Header) -> Switches:
    start = mixed(header, replace(plain(header), activation="relu", early_router=True), normed=True)
    if not header.info.sliding_window:
        return start
    whole = tuple(layer % _PERIOD == 0 for layer in range(header.hyper.n_layer))
    return replace(start, sliding_window=_WINDOW, sliding=tuple(not sees for sees in whole), unrotated=whole)


SMALLTHINKER = Architecture(_switches, keys=SCALING_KEYS | EXPERT_KEYS | {"attention.sliding_window"})
