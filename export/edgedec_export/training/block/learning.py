"""The loss of blocks of drafts: cross entropy at first, later mostly how far the drafter's law is from the target's.

That distance, the sum of |p - q|, is twice the chance that a drawn draft is refused (DSpark trains the same). A row's
scores are products with the target's output rows, and with the Markov head's, which see the token before alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edgedec_export.training.network import ROWS_AT_ONCE, Tensor

_CROSS_ENTROPY_ALONE = 0.2  # of the training: the distance's gradients are weak where the drafter knows nothing
_DISTANCE_SHARE = 0.8  # of the loss, from twice that part of the training on


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """What makes scores of states: the output rows beside the Markov head's.

    Attributes:
        rows: [n_vocab_draft, n_embd] of product_type, the target's output rows, which do not learn.
        markov: f32[n_vocab_draft, rank], the Markov head's.
    """

    rows: Tensor
    markov: Tensor

    def joined(self) -> Tensor:
        """Return [n_vocab_draft, n_embd + rank] of product_type, the rows side by side."""
        return torch.cat([self.rows, self.markov.detach().to(self.rows.dtype)], 1)


def distance_share(part: float) -> float:
    """Return the distance's share of the loss when so much of the training is over.

    >>> [round(distance_share(part), 2) for part in (0.1, 0.2, 0.3, 0.4, 1.0)]
    [0.0, 0.0, 0.4, 0.8, 0.8]
    """
    return _DISTANCE_SHARE * min(1.0, max(0.0, part / _CROSS_ENTROPY_ALONE - 1))


def loss_of(states: Tensor, scorer: Scorer, shares: Tensor, which: Tensor, distance: float) -> tuple[Tensor, Tensor]:
    """Return the loss of drafts, and a number whose gradient by the drafter's tensors is the loss's.

    The gradient by the scores is made at once, so that no more than a few rows of scores are kept.

    Args:
        states: f32[n, n_embd + rank], the rows' states, each beside the Markov embedding of the token before.
        scorer: The output rows.
        shares: [N, n_vocab_draft] of product_type, the target's probabilities at each place of the answers.
        which: int64[n], the place that each row foresees.
        distance: The share of the sum of |p - q| in the loss; the rest is the cross entropy's.
    """
    joined, rank = scorer.joined(), scorer.markov.shape[1]
    total, by_state, by_markov = torch.zeros((), device=states.device), [], torch.zeros_like(scorer.markov)
    with torch.no_grad():
        weight = 1 / max(1, len(which))
        pieces = (values.split(ROWS_AT_ONCE) for values in (states.to(joined.dtype), which))
        for x, index in zip(*pieces, strict=True):
            logs = F.linear(x, joined).float().log_softmax(-1)
            p = shares[index].float()
            total -= (1 - distance) * weight * (p * logs).sum()
            q = logs.exp_()
            gradient = (1 - distance) * (q - p)
            if distance:
                off = q - p
                total += 2 * distance * weight * off.abs().sum()
                signs = off.sign_()
                gradient += 2 * distance * q * (signs - (q * signs).sum(-1, keepdim=True))
            gradient = (weight * gradient).to(joined.dtype)
            by_state.append(gradient @ joined)
            by_markov += gradient.T @ x[:, -rank:]
    handle = (states * torch.cat([*by_state, states[:0]]).float()).sum() + (scorer.markov * by_markov).sum()
    return total, handle
