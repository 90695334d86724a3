"""Ministral 3 and Mistral Small 3 of Mistral AI, the text model: YaRN, and queries that grow with their position."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import LLAMA3_DIVISORS, SCALING_KEYS


def _switches(header: Header) -> Switches:
    start = plain(header)
    scale = header.number("attention.temperature_scale", 0.0)
    return replace(
        start,
        rope_interleaved=True,
        temperature_scale=scale,
        temperature_tokens=start.rope.n_ctx_original if scale else 0,
    )


MISTRAL3 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"attention.temperature_scale"},
    vectors=frozenset({LLAMA3_DIVISORS}),
)
