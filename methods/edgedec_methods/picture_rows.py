"""FlowCut: a share of a picture's rows stays, by what flows through its patches in all layers of the encoder.

What a patch gives in a layer is the attention that it gets, times the size of its value. Its score is half of what it
gives in the last layer, a fourth of that in the one before, and so on. The encoder has no class token, so the attention
is that of the patches' mean query, as the paper's own program has it for Qwen2-VL. With `by=attention` a score is the
mean attention that a patch gets in the last layer alone. A row's score is the sum of those of its patches. The paper
also leaves patches out between layers; here all go through the encoder, and the model reads fewer rows.

Lossy: what was left out is not seen. What that costs in answers is unmeasured: no real encoder has run with it.

Paper: FlowCut, Tong et al. 2025, arXiv:2505.19536
Option: `--method picture-rows:0.33`, with `by=attention` for the last layer's attention
For: prompts that are mostly pictures, where a shorter wait is worth other answers
Measured: a random encoder: a prompt of 512 rows is read in 8.0 ms, with 338 in 5.2, with 168 in 3.0, after 50 to 59 ms
    of encoding; KL to all rows is 1.1 and 1.9 nats, by attention 0.9 and 1.9 (studied at d654a71b)
Status: opt-in
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import OptionError
from edgedec.model import Session

RULE = 1
"""The version of the scores: kept rows and prompts of another one are not taken."""
SCORES = ("flow", "attention")


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Implements edgedec_runtimes.pictures.fewer_rows.RowChooser, with the options of a method.

    Attributes:
        share: The share of each tile's rows that stay.
        by: The score that rows stay by: flow or attention.

    Raises:
        OptionError: The share is not given, or not above 0 and at most 1; or there is no such score.
    """

    share: float | None = None
    by: str = "flow"

    role: ClassVar[str] = ""
    what: ClassVar[str] = "pictures with a share of their rows (picture_rows)"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise OptionError("share", self.share, "it is the share of a picture's rows that stay, such as 0.33")
        if self.by not in SCORES:
            raise OptionError("by", self.by, f"it is {' or '.join(SCORES)}")

    @property
    def kept_share(self) -> float:
        """The share of a tile's rows that stay."""
        return self.share or 1.0

    @property
    def choice(self) -> str:
        """What the choice of rows depends on."""
        return f"{self.by} {RULE} {self.kept_share}"

    @property
    def reads_flow(self) -> bool:
        """Whether the score is of all layers."""
        return self.by == "flow"

    def worth(self, seen: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return each patch's score: the mean of the last layer's, and the score of the layers before it."""
        score: NDArray[np.float32] = seen[0]
        for layer in seen[1:]:
            score = (score + layer) / np.float32(2)
        return score

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return the target's own session: only the encoder of pictures works otherwise."""
        return target
