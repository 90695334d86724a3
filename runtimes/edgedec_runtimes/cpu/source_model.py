"""Models with an encoder on the cpu runtime: what they share with others of their kind is in shared/sources.py."""

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.model import RowGroup
from edgedec.model_card import Capabilities
from edgedec_runtimes.cpu.kv_types import PAGE_TOKENS
from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.model import CAPABILITIES, CpuModel
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.cpu.state_memory import BLOCK_TOKENS
from edgedec_runtimes.shared.session_state import CheckedItem
from edgedec_runtimes.shared.sources import SourceModel, SourceSession

SOURCE_CAPABILITIES = Capabilities(
    rollback=True, trees=True, fork=True, keeps_prompts=True, max_rows=CAPABILITIES.max_rows, prefill_chunk=1
)


class CpuSourceSession(SourceSession, CpuSession):
    """Implements edgedec.model.Session."""

    _model: "CpuSourceModel"

    def hold_source(self, source: NDArray[np.int32], n_encoded: int) -> None:
        """Hold a source, of which the encoder has read `n_encoded` tokens; the native rows are told its length."""
        super().hold_source(source, n_encoded)
        self.rows.item.n_source = len(source)

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Begin to read a prompt: with its source as the session holds it, or else as the disk does."""
        n_held = super().recall(token_ids, n_held)
        n = CpuSession.recall(self, token_ids, n_held)
        if n > n_held:
            self.hold_source(np.array(token_ids[:n], np.int32), n)
        return n

    def block_bounds(self, token_ids: Sequence[int]) -> list[int]:
        """Return where a prompt's source begins and ends, if its pages have room and a text stands behind it."""
        start = self._model.start
        n = token_ids.index(start) if start in token_ids else 0
        return [0, n] if BLOCK_TOKENS <= n <= self.n_ctx // PAGE_TOKENS * PAGE_TOKENS else [0]


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
        if self.kept_prompts is not None:
            self.kept_prompts.note(rows, 0, n)
