"""Models that embed texts on the cpu runtime: an encoder alone, which reads each text in one native forward."""

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import counted
from edgedec.memory_plan import MemoryTerm
from edgedec.model import ForwardItem, RowGroup
from edgedec.model_card import Capabilities
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.shared.encoder_session import EncoderSession
from edgedec_runtimes.shared.final_norm import FinalNorm

ENCODERS = frozenset({"t5encoder"})
"""The architectures of such models."""
ENCODER_CAPABILITIES = Capabilities(rollback=False, exact_trees=False, taps=True, final_states=True, max_rows=1)

_NO_ROWS = np.empty(0, np.int32)
_STATE_BYTES = 32  # of each element: two copies as the layers leave it, and what its norm takes


class CpuEncoderSession(EncoderSession, CpuSession):
    """Implements edgedec.model.EncoderSession."""


class CpuEncoder(CpuModel):
    """Implements edgedec.model.Model; its sessions have `final_states` and no other forwards.

    Attributes:
        norm: What stands behind the last layer.
    """

    batch_invariant = 1  # so that a session is no part of a batch, which has no `final_states`
    session_type = CpuEncoderSession
    norm: FinalNorm

    def final_states(
        self, session: CpuEncoderSession, tokens: NDArray[np.int32], n_first: int | None
    ) -> NDArray[np.float32]:
        """Return f32[n, n_embd], the final state of each token; see edgedec.model.EncoderSession."""
        last = self.card.n_layer - 1
        session.rows.item.n_source = len(tokens)
        (result,) = self.forward([ForwardItem(session, 0, (RowGroup(tokens),), _NO_ROWS, (last,))])
        session.state.restore(0, True)
        return self.norm.of(result.hidden[last])


def state_term(network: Network, n_ctx: int) -> MemoryTerm:
    """Return the term of the memory plan for the states of the longest text."""
    return MemoryTerm("states", n_ctx * network.n_embd * _STATE_BYTES, counted(n_ctx, "token"))
