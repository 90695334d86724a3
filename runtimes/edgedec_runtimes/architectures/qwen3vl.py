"""The dense text models of Qwen3-VL (2025): Qwen3, whose rotation is divided into sections.

`n_deepstack_layers` says in how many layers a picture adds to the state. A text adds nothing there.
"""

from dataclasses import replace

from edgedec_runtimes.architectures.qwen3 import QWEN3
from edgedec_runtimes.architectures.rope import SECTIONS

PICTURE_KEYS = frozenset({SECTIONS, "n_deepstack_layers"})

QWEN3VL = replace(QWEN3, keys=QWEN3.keys | PICTURE_KEYS)
