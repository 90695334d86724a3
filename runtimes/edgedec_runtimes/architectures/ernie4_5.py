"""ERNIE 4.5 of Baidu (2025), the dense models: a Llama."""

from edgedec_runtimes.architectures.architecture import Architecture
from edgedec_runtimes.architectures.llama import LLAMA
from edgedec_runtimes.architectures.rope import SCALING_KEYS

ERNIE4_5 = Architecture(LLAMA.switches, keys=SCALING_KEYS, vectors=LLAMA.vectors)
