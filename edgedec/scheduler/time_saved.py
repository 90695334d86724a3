"""What the drafts of a text saved, by the plain steps of the same text."""

from dataclasses import dataclass, field
from statistics import fmean

from edgedec.draft_constants import BUCKET, NOTICED, SURE


@dataclass(slots=True)
class _Steps:
    """The steps of a text in contexts of about one length.

    Attributes:
        n_tokens: Tokens that all of these steps gave.
        plain_s: Seconds of each forward of one row without a draft.
    """

    n_tokens: int = 0
    plain_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TimeSaved:
    """Compares the steps of a text after its first token with as many plain steps as it has tokens.

    A plain step is taken to cost what the plain steps of the same text in contexts of about the same length cost. So
    nothing is known of a text that had no such steps.
    """

    _by_context: dict[int, _Steps] = field(default_factory=dict)
    _spent_s: float = 0.0

    def count(self, n_past: int, n_tokens: int, spent_s: float, plain_s: float | None) -> None:
        """Count a step after `n_past` tokens that gave `n_tokens`.

        Args:
            n_past: Tokens in the KV cache before the step.
            n_tokens: Tokens that the step gave.
            spent_s: Seconds of the step's forward, of proposing and of what drafters learned.
            plain_s: Seconds of a plain step's forward, as this step shows them; None where it had a draft, or shared
                its forward with other texts.
        """
        steps = self._by_context.setdefault((n_past // BUCKET).bit_length(), _Steps())
        steps.n_tokens += n_tokens
        self._spent_s += spent_s
        if plain_s is not None:
            steps.plain_s.append(plain_s)

    def seconds(self) -> float | None:
        """Return the seconds saved, below 0 where drafting cost time; None where plain steps were too few to know."""
        known = [steps for steps in self._by_context.values() if len(steps.plain_s) >= SURE]
        n_known, n_all = (sum(steps.n_tokens for steps in which) for which in (known, self._by_context.values()))
        if not n_known or n_all - n_known > NOTICED * n_all:
            return None
        plain_s = sum(steps.n_tokens * fmean(steps.plain_s) for steps in known)
        return plain_s * n_all / n_known - self._spent_s
