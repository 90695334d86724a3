"""Seed OSS of ByteDance (2025): a Qwen2 whose files call the norm before the feed-forward block by another name."""

from edgedec_runtimes.architectures.architecture import BIASES, Architecture
from edgedec_runtimes.architectures.rope import SCALING_KEYS

SEED_OSS = Architecture(keys=SCALING_KEYS, vectors=BIASES, renamed={"post_attention_norm.weight": "ffn_norm.weight"})
