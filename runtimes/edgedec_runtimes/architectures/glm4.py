"""GLM 4 of Z.ai, the 9B and 32B of 2025: norms before and behind the half-layers; gate and up are one matrix."""

from edgedec_runtimes.architectures.architecture import BIASES, INPUT_NORMS, POST_NORMS, Architecture
from edgedec_runtimes.architectures.llama import LLAMA
from edgedec_runtimes.architectures.rope import SCALING_KEYS

GLM4 = Architecture(LLAMA.switches, keys=SCALING_KEYS, vectors=BIASES, needed=INPUT_NORMS | POST_NORMS)
