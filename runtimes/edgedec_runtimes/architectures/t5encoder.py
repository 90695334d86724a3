"""T5's encoder alone, which embeds texts: its layers are those of a T5 without what its decoder needs."""

from dataclasses import replace

from edgedec_runtimes.architectures.t5 import KEYS, T5, encoder_layers

T5ENCODER = replace(T5, keys=KEYS, layers=encoder_layers)
