"""LLaDA (arXiv:2502.09992): a Llama that predicts masked tokens, and whose rows see the whole text."""

from edgedec_runtimes.architectures.architecture import BIASES, Architecture
from edgedec_runtimes.architectures.llama import LLAMA
from edgedec_runtimes.architectures.rope import SCALING_KEYS

LLADA = Architecture(LLAMA.switches, keys=SCALING_KEYS | {"attention.causal"}, vectors=BIASES)
