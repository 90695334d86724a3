"""The update of tensors that learn: matrices by Muon (Jordan et al. 2024), which takes fewer steps than Adam.

Vectors are updated by AdamW.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from edgedec_export.training.arithmetic import product_type
from edgedec_export.training.network import Tensor, Weights

_WARM_UP = 0.03
_LAST_RATE = 0.02  # of the highest
_LARGEST_GRADIENT = 1.0
_MOMENTUM, _DECAY = 0.95, 0.01
_SIZE = 0.2  # of an element of an update, as AdamW's are
_NEWTON_SCHULZ, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Muon:
    """Momentum whose singular values are made about equal, by Newton and Schulz's iteration.

    The same update as torch.optim.Muon's, which computes in bfloat16 on every device: most of a training's time on a
    processor that has no instructions for it. Updates are as large as AdamW's (Moonlight, arXiv:2502.16982).

    Attributes:
        momenta: For each matrix, the mean of its gradients.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]

    def step(self, rate: float) -> None:
        """Move every matrix that has a gradient against it."""
        with torch.no_grad():
            for matrix, momentum in zip(self._matrices, self.momenta, strict=True):
                if matrix.grad is None:
                    continue
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                update = _even(matrix.grad.lerp(momentum, _MOMENTUM))
                matrix.mul_(1 - rate * _DECAY)
                matrix.add_(update, alpha=-rate * _SIZE * math.sqrt(max(matrix.shape)))


def _even(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors, whose singular values lie between about 0.7 and 1.2."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide.to(product_type(matrix.device.type))
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        squares = x @ x.T
        x = torch.addmm(a * x, torch.addmm(b * squares, squares, squares, alpha=c), x)
    return (x.T if wide is not matrix else x).to(matrix.dtype)


class Optimizers:
    """The optimizers of a drafter's tensors, which they change in place.

    Args:
        weights: The tensors by name. Matrices and vectors that require a gradient learn.
        matrix_rate: The highest learning rate of matrices.
        vector_rate: The highest learning rate of vectors.
        table: The name of a matrix whose rows are read one by one, which learn as vectors do; "" where there is none.
    """

    def __init__(self, weights: Weights, matrix_rate: float, vector_rate: float, table: str = "") -> None:
        self._weights, self._matrix_rate, self._vector_rate = weights, matrix_rate, vector_rate
        learned = {name: values for name, values in weights.items() if values.requires_grad}
        self._tensors = list(learned.values())
        matrices = [values for name, values in learned.items() if values.ndim == 2 and name != table]
        vectors = [values for name, values in learned.items() if values.ndim == 1 or name == table]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0) if vectors else None

    def descend(self, handle: Tensor, part: float) -> None:
        """Take one step down the gradient of `handle`, a number; `part` of the training is over, 0 to 1."""
        for values in self._tensors:
            values.grad = None
        handle.backward()
        torch.nn.utils.clip_grad_norm_(self._tensors, _LARGEST_GRADIENT)
        share = rate_at(part)
        self._muon.step(share * self._matrix_rate)
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = share * self._vector_rate
            self._adam.step()

    def state(self) -> dict[str, Any]:
        """Return all that changes, the tensors among it, for restore()."""
        weights = {name: values.detach() for name, values in self._weights.items()}
        adam = None if self._adam is None else self._adam.state_dict()
        return {"weights": weights, "momenta": self._muon.momenta, "adam": adam}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        with torch.no_grad():
            for name, values in self._weights.items():
                values.copy_(state["weights"][name])
            for momentum, saved in zip(self._muon.momenta, state["momenta"], strict=True):
                momentum.copy_(saved)
        if self._adam is not None:
            self._adam.load_state_dict(deepcopy(state["adam"]))  # torch would share its tensors


def rate_at(part: float) -> float:
    """Return the share of the highest learning rate when so much of the training is over: a warm-up, then a cosine.

    >>> [round(rate_at(part), 2) for part in (0.0, 0.015, 0.03, 0.515, 1.0)]
    [0.02, 0.5, 1.0, 0.51, 0.02]
    """
    if part < _WARM_UP:
        return max(_LAST_RATE, part / _WARM_UP)
    rest = min(1.0, (part - _WARM_UP) / (1 - _WARM_UP))
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * rest))
