"""Dream (arXiv:2508.15487): a Qwen2 that predicts masked tokens, and whose rows see the whole text."""

from edgedec_runtimes.architectures.architecture import BIASES, Architecture
from edgedec_runtimes.architectures.rope import SCALING_KEYS

DREAM = Architecture(keys=SCALING_KEYS | {"attention.causal"}, vectors=BIASES)
