"""Llama (Touvron et al. 2023, arXiv:2302.13971) and the many models of its shape."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import BIASES, OUTPUT_BIAS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import LLAMA3_DIVISORS, SCALING_KEYS


def _switches(header: Header) -> Switches:
    return replace(plain(header), rope_interleaved=True)


LLAMA = Architecture(_switches, keys=SCALING_KEYS, vectors=BIASES | {OUTPUT_BIAS, LLAMA3_DIVISORS})
