"""The text models of Qwen3-VL with mixtures of experts, such as Qwen3-VL-30B-A3B: Qwen3's, with sections (qwen3vl)."""

from dataclasses import replace

from edgedec_runtimes.architectures.qwen3moe import QWEN3MOE
from edgedec_runtimes.architectures.qwen3vl import PICTURE_KEYS

QWEN3VLMOE = replace(QWEN3MOE, keys=QWEN3MOE.keys | PICTURE_KEYS)
