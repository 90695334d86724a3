"""Denoising in a plain form: every pass evaluates the whole text on a session of its own, and nothing is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Model, RowGroup
from edgedec.pictures import Block
from edgedec.sampling import Noise, SamplingParams, draw
from support.forwards import evaluated
from support.models.tiny_quantized import Tiny, write_tiny

MASK = 260
TINY = Tiny("qwen3", n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_ff=64, n_vocab=272)
FORMS: dict[str, dict[str, Any]] = {
    "blocks": {"diffusion.block_size": 8, "diffusion.shift_logits": False},
    "shifted": {"diffusion.block_size": 8, "diffusion.shift_logits": True},
    "whole": {"qwen3.attention.causal": False, "diffusion.shift_logits": True},
}
"""Rows that see their block of 8; the same, each of the position behind it; rows that see the whole text."""
ALL_FORMS: dict[str, dict[str, Any]] = FORMS | {
    "in_front": {"diffusion.window_size": 8, "diffusion.shift_logits": False},
}
"""And rows that see what is before them, which are tokens, and then masks."""
Choose = Callable[[NDArray[np.float64]], NDArray[np.bool_]]
Ends = Callable[[list[int], list[int], NDArray[np.float64]], int | None]
"""(masked positions, their tokens, confidences) of a block's first pass -> its last position; None for the default."""


def write_model(path: Path, form: str, **keys: Any) -> Path:
    """Write a tiny random diffusion language model; `keys` replace keys of it, None leaves one out."""
    metadata = {"tokenizer.ggml.mask_token_id": MASK, **ALL_FORMS[form], **keys}
    return write_tiny(path, TINY, metadata={key: value for key, value in metadata.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Plain:
    """Writes texts on a model.

    Attributes:
        model: The runtime's model.
        form: Of FORMS.
        choose: (confidences of the masked positions) -> which of them to commit.
        params, seed: How tokens are drawn.
        length: Positions that are denoised together where rows see the whole text.
        ends: Where a block ends.
    """

    model: Model
    form: str
    choose: Choose
    params: SamplingParams
    seed: int = 0
    length: int = 32
    ends: Ends = lambda places, tokens, confidences: None

    def text(self, prompt: Sequence[int], n: int) -> tuple[list[int], int]:
        """Return `n` tokens behind a prompt, and in how many passes they came."""
        facts, n_passes = ALL_FORMS[self.form], 0
        block, shift = facts.get("diffusion.block_size"), facts["diffusion.shift_logits"]
        ids, end_of_all = list(prompt), len(prompt) + n
        while (n_before := len(ids)) < end_of_all:
            start = len(ids) // block * block if block else len(ids)
            length = facts.get("diffusion.window_size", self.length)
            end = start + block if block else min(start + length, end_of_all)
            seen = end_of_all if self.form == "whole" else end
            ids += [MASK] * (seen - len(ids))
            n_known, is_first = min(end, end_of_all), True
            while MASK in ids[start:n_known]:
                places = looked_at(self.model, ids, max(start, n_before), end)
                rows = self._rows(ids, block or seen, [place - shift for place in places])
                rows[:, MASK] = -1e30
                tokens = [
                    draw(row, self.params, (), Noise(self.seed), place) for place, row in zip(places, rows, strict=True)
                ]
                laws = np.exp(rows.astype(np.float64) - rows.max(1, keepdims=True))
                confidences = laws[range(len(places)), tokens] / laws.sum(1)
                if is_first and (last := self.ends(places, tokens, confidences)) is not None:
                    end = n_known = last + 1
                    confidences = confidences[[place < end for place in places]]
                is_first = False
                chosen = self.choose(confidences)
                chosen = chosen if chosen.any() else np.arange(len(places)) == confidences.argmax()
                for place, token, is_chosen in zip(places, tokens, chosen, strict=False):
                    ids[place] = token if is_chosen else MASK
                n_passes += 1
            ids = ids[:n_known]
        return ids[len(prompt) :], n_passes

    def _rows(self, ids: Sequence[int], block: int, wanted: Sequence[int]) -> NDArray[np.float32]:
        session, grid = self.model.session(len(ids)), Block(block, 1, 1, mutual=True)
        tokens, positions = np.array(ids, np.int32), None
        rows = np.array(wanted, np.int32)
        if self.form == "in_front":
            positions = np.argsort(tokens == MASK, kind="stable").astype(np.int32)
            tokens, rows = tokens[positions], np.flatnonzero(np.isin(positions, wanted)).astype(np.int32)
        try:
            block_of = grid if positions is None else None
            found = evaluated(session, 0, RowGroup(tokens, sees=block_of, positions=positions), rows=rows)
            return found.logits.copy()
        finally:
            session.close()


def looked_at(model: Model, ids: Sequence[int], begin: int, end: int) -> list[int]:
    """Return the masked positions in front of a committed end of text; all where there are none."""
    places = [i for i in range(begin, end) if ids[i] == MASK]
    ends = [i for i in range(begin, end) if ids[i] != MASK and model.tokenizer.is_end(ids[i])]
    return [i for i in places if i < min(ends, default=end)] or places
