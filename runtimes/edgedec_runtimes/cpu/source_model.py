"""Models with an encoder on the cpu runtime: what they share with others of their kind is in shared/sources.py."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgedec.model import RowGroup
from edgedec.model_card import Capabilities
from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.model import CAPABILITIES, CpuModel
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.shared.session_state import CheckedItem
from edgedec_runtimes.shared.sources import SourceModel, SourceSession

SOURCE_CAPABILITIES = Capabilities(
    rollback=True, trees=True, fork=True, max_rows=CAPABILITIES.max_rows, prefill_chunk=1
)


class CpuSourceSession(SourceSession, CpuSession):
    """Implements edgedec.model.Session."""

    def hold_source(self, source: NDArray[np.int32], n_encoded: int) -> None:
        """Hold a source, of which the encoder has read `n_encoded` tokens; the native rows are told its length."""
        super().hold_source(source, n_encoded)
        self.rows.item.n_source = len(source)


class CpuSourceModel(SourceModel[ctypes.c_void_p, CpuSession], CpuModel):
    """Implements edgedec.model.Model for networks with an encoder."""

    session_type = CpuSourceSession

    def _encode(self, session: CpuSourceSession) -> None:
        """Have the encoder read a session's source, all of it in one native forward."""
        n = len(session.source)
        rows = CheckedItem(session, 0, (RowGroup(session.source),), n, None, np.empty(0, np.int32))
        session.rows.fill(rows, 0, n)
        place, flag = self._logits_address, self._flag_address
        if code := native().ec_forward(self.handle, session.rows.pointer, 1, place, self._best, flag):
            self._refuse(code)
