"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases."""

from edgedec_runtimes.architectures.architecture import BIASES, Architecture
from edgedec_runtimes.architectures.rope import SCALING_KEYS

QWEN2 = Architecture(keys=SCALING_KEYS | {"attention.causal"}, vectors=BIASES)
