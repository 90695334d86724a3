"""Medusa and Hydra heads in torch: their tensors, and what they give for each token of a draft.

Both draft from what left the target's last layer at the newest token whose forward is done, position t; the target
itself chooses token t + 1 there. Medusa's head k (arXiv:2401.10774) foresees token t + 2 + k from that state alone.
Hydra's head k (arXiv:2402.05109) reads the embeddings of tokens t + 1 to t + 1 + k beside it. A head returns
y = C z + SiLU(A z), where z joins the state and what is read. In Medusa's paper C is the identity, and every head has
an output matrix that learns; here both kinds share the target's own rows of the tokens that can be drafted, as EAGLE-3
heads do, and each head has a norm of its own before them. With C fixed, Medusa's heads did worse.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from relatives_costs import DraftBytes, bytes_of
from relatives_learning import Step, embeddings_of, unit

from edgedec_export.training.batches import Batch
from edgedec_export.training.network import FIRST_OUTPUT, Tensor, Weights
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.target_parts import TargetParts

_MATRIX_RATES = {False: 2e-2, True: 8e-3}  # by whether heads read drafts; chosen after 20,000 tokens


class Heads:
    """Implements relatives_learning.Network: a head for each token of the longest draft.

    Args:
        parts: The target.
        reads_drafts: Each head reads the tokens before the one that it foresees: Hydra's heads do, Medusa's don't.
    """

    def __init__(self, parts: TargetParts, *, reads_drafts: bool) -> None:
        self._parts, self._reads_drafts = parts, reads_drafts
        self.n_learned, self.matrix_rate = MOST_DRAFTED, _MATRIX_RATES[reads_drafts]
        draw, n = torch.Generator().manual_seed(0), parts.network.n_embd
        self.weights: Weights = {}
        for k in range(MOST_DRAFTED):
            n_in = n * (1 + self.n_read(k))
            through = torch.randn(n, n_in, generator=draw) * (0.2 / math.sqrt(n_in))
            through[:, :n] += torch.eye(n)  # a head that has learned nothing foresees token t + 1
            self.weights[f"inner{k}"] = torch.randn(n, n_in, generator=draw) * (0.2 / math.sqrt(n_in))
            self.weights[f"through{k}"] = through
            self.weights[f"norm{k}"] = torch.from_numpy(FIRST_OUTPUT * np.asarray(parts.output_norm, np.float32))
        for values in self.weights.values():
            values.requires_grad_()

    def n_read(self, head: int) -> int:
        """Return how many tokens a head reads."""
        return head + 1 if self._reads_drafts else 0

    def steps(self, batch: Batch) -> Iterator[Step]:
        """Yield what each head gives."""
        table, state = unit(embeddings_of(self._parts, batch.answers)), unit(torch.from_numpy(batch.last))
        for k, which in enumerate(batch.which):
            n_read = self.n_read(k)
            read = [table[torch.from_numpy(which - n_read + i)] for i in range(n_read)]
            yield Step(self._output(k, state[torch.from_numpy(which - k - 1)], read))

    def _output(self, head: int, state: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        w, x = self.weights, torch.cat([state, *embeddings], -1)
        y = F.linear(x, w[f"through{head}"]) + F.silu(F.linear(x, w[f"inner{head}"]))
        return unit(y) * w[f"norm{head}"]

    def draft_bytes(self, rows: float) -> DraftBytes:
        """Return the bytes that drafts read; the output rows have `rows`.

        Medusa's heads need nothing of each other, so their products with the output rows are one; a Hydra head waits
        for the token of the one before.
        """
        heads = [bytes_of(self.weights, (f"inner{k}", f"through{k}")) for k in range(MOST_DRAFTED)]
        if self._reads_drafts:
            return DraftBytes(0.0, tuple(head + rows for head in heads))
        return DraftBytes(rows, tuple(heads))
