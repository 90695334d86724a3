"""Qwen3 (arXiv:2505.09388): each head of queries and keys is normalized."""

from edgedec_runtimes.architectures.architecture import QK_NORMS, Architecture
from edgedec_runtimes.architectures.rope import SCALING_KEYS

QWEN3 = Architecture(keys=SCALING_KEYS | {"attention.causal"}, vectors=QK_NORMS)
