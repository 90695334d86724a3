"""What a draft takes: a part once, and a part for each level of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftPrice:
    """What a draft takes, in seconds or in plain steps: a part for each level of it, and a part whatever its levels.

    Attributes:
        level: For each token deeper.
        once: For the draft: a block drafter evaluates all of its levels at once.
    """

    level: float
    once: float = 0.0

    def of(self, n_levels: float) -> float:
        """Return what a draft of so many levels takes.

        >>> DraftPrice(1.0, once=5.0).of(3)
        8.0
        """
        return self.once + n_levels * self.level

    def times(self, factor: float) -> "DraftPrice":
        """Return the price in another unit, of which there are `factor` in one of this."""
        return DraftPrice(self.level * factor, self.once * factor)
