"""The update of tensors that learn: matrices by Muon (Jordan et al. 2024), which takes fewer steps than Adam.

Vectors are updated by AdamW.
"""

import math
from copy import deepcopy
from typing import Any

import torch

from edgedec_export.training.network import Tensor, Weights

_WARM_UP = 0.03
_LAST_RATE = 0.02  # of the highest
_LARGEST_GRADIENT = 1.0


class Optimizers:
    """The optimizers of a drafter's tensors, which they change in place.

    Args:
        weights: The tensors by name. Matrices and vectors that require a gradient learn.
        matrix_rate: The highest learning rate of matrices.
        vector_rate: The highest learning rate of vectors.
        table: The name of a matrix whose rows are read one by one, which learn as vectors do; "" where there is none.
    """

    def __init__(self, weights: Weights, matrix_rate: float, vector_rate: float, table: str = "") -> None:
        self._weights = weights
        learned = {name: values for name, values in weights.items() if values.requires_grad}
        self._tensors = list(learned.values())
        matrices = [values for name, values in learned.items() if values.ndim == 2 and name != table]
        vectors = [values for name, values in learned.items() if values.ndim == 1 or name == table]
        self._optimizers: list[tuple[Any, float]] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append((muon, matrix_rate))
        if vectors:
            adam = torch.optim.AdamW(vectors, lr=vector_rate, betas=(0.9, 0.95), weight_decay=0.0)
            self._optimizers.append((adam, vector_rate))

    def descend(self, handle: Tensor, part: float) -> None:
        """Take one step down the gradient of `handle`, a number; `part` of the training is over, 0 to 1."""
        for optimizer, _ in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        handle.backward()
        torch.nn.utils.clip_grad_norm_(self._tensors, _LARGEST_GRADIENT)
        share = rate_at(part)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * rate
            optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return all that changes, the tensors among it, for restore()."""
        weights = {name: values.detach() for name, values in self._weights.items()}
        return {"weights": weights, "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        with torch.no_grad():
            for name, values in self._weights.items():
                values.copy_(state["weights"][name])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(deepcopy(saved))  # torch would share its tensors


def rate_at(part: float) -> float:
    """Return the share of the highest learning rate when so much of the training is over: a warm-up, then a cosine.

    >>> [round(rate_at(part), 2) for part in (0.0, 0.015, 0.03, 0.515, 1.0)]
    [0.02, 0.5, 1.0, 0.51, 0.02]
    """
    if part < _WARM_UP:
        return max(_LAST_RATE, part / _WARM_UP)
    rest = min(1.0, (part - _WARM_UP) / (1 - _WARM_UP))
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * rest))
