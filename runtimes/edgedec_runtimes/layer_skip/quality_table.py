"""The measured loss of quality when layers are left out, by the shape of a model.

The rows of a model end at the highest recommended speed-up: the last one at which the perplexity was at most twice that
of the whole model. The rows come from

    edgedec eval MODEL --runtime cpu --layer-skip 1.05 --layer-skip 1.1 ...

on the default text, with evenly spaced layers (no tuned set on the disk). docs/findings.md has what they bring.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Shape = tuple[str, int, int]
"""Architecture, layers, and values of a hidden state."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A speed-up and the quality that it costs.

    Attributes:
        speedup: As it was requested: at most 1 / speedup of a token's bytes are read.
        kl_mean: Mean KL divergence from the whole model, in nats.
        top1: Share of positions where the most probable token is the whole model's.
    """

    speedup: float
    kl_mean: float
    top1: float


MEASURED: Mapping[Shape, tuple[Measured, ...]] = {
    ("llama", 30, 576): (  # smollm2-135m
        Measured(1.02, 0.175, 0.766),
        Measured(1.05, 0.626, 0.591),
    ),
    ("qwen2", 24, 896): (  # qwen2.5-coder-0.5b
        Measured(1.02, 0.099, 0.815),
        Measured(1.05, 0.338, 0.681),
        Measured(1.1, 0.734, 0.561),
    ),
}
