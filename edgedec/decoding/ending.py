"""Where a text ends: by an end token, a stop string, its grammar, max_tokens, doubt, or because the context is full."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from edgedec.constraint import Constraint
from edgedec.decoding.unsure import UnsureStop, unsure_stop
from edgedec.draft import Verification
from edgedec.model import Forward, Session
from edgedec.sequence import FinishReason, Request, Sequence


def _never(token_id: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EndBefore:
    """Says that a text ends before a token, which is no part of it.

    Attributes:
        reason: Why.
        chance: The token's estimated chance to be right, where the text ends because that is too small.
        note: A sentence for a person about that; may be empty.
    """

    reason: FinishReason
    chance: float | None = None
    note: str = ""


_END_TOKEN = EndBefore("stop")


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Decides where the text of one generation ends; by default it never does.

    Attributes:
        is_end: `(token_id)` -> whether the token ends the text.
        max_tokens: Most tokens to generate; None for no limit.
        n_most: Most tokens of the text, the prompt included, that the session takes.
        constraint: The grammar that the text keeps to, or None.
        unsure: Judges whether a token is likely to be wrong, or None.
        temperature: At which the constraint's log Z is counted.
    """

    is_end: Callable[[int], bool] = _never
    max_tokens: int | None = None
    n_most: int = sys.maxsize
    constraint: Constraint | None = None
    unsure: UnsureStop | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, request: Request, session: Session, constraint: Constraint | None) -> "TextEnd":
        """Return what decides about the text of a request on a session."""
        is_end = _never if request.sampling.ignore_end else session.model.tokenizer.is_end
        unsure = unsure_stop(request.sampling.stop_unsure, session.model.card)
        temperature = request.sampling.temperature or 1.0
        return cls(is_end, request.sampling.max_tokens, session.n_text_max, constraint, unsure, temperature)

    def cut(self, verification: Verification, forward: Forward) -> tuple[Verification, EndBefore | None]:
        """Return what a step adds to the text, up to the token that ends it; the grammar takes these tokens.

        What a draft had behind the end is no text, so no drafter may learn it. Where the grammar puts another token in
        the place of a token, the step ends there, too. The second result says why the text ends before the last token
        of the step; None where it does not.

        Args:
            verification: What was verified.
            forward: The forward that it was verified with. Row 0 of its logits is that of the first token, row i + 1
                that of the token behind node i.
        """
        path, token_ids, constraint = verification.path, verification.token_ids, self.constraint
        rows = [0, *(node + 1 for node in path)]
        masses = self._log_masses(token_ids, forward, rows)  # before the first token is committed
        for i, token_id in enumerate(token_ids):
            taken = token_id if constraint is None else constraint.commit(token_id)
            if constraint is not None:
                constraint.logprob += masses[i]
            end = self._end_before(taken, forward, rows[i])
            if end is not None or taken != token_id or (constraint is not None and constraint.is_over):
                return Verification(path[:i], (*token_ids[:i], taken)), end
        return verification, None

    def _log_masses(self, token_ids: tuple[int, ...], forward: Forward, rows: list[int]) -> list[float]:
        """Return the log Z of the row of each token, by the masks that the tokens were drawn with."""
        if self.constraint is None:
            return []
        logits, log_mass = forward.logits, self.constraint.log_mass
        return [log_mass(logits[rows[i]], token_ids[:i], self.temperature) for i in range(len(token_ids))]

    def _end_before(self, token_id: int, forward: Forward, row: int) -> EndBefore | None:
        """Return why the text ends before a token that was drawn from a row; None where it does not."""
        if self.is_end(token_id):
            return _END_TOKEN
        if self.unsure is not None:
            chance = self.unsure.chance(forward.logits[row], token_id, forward.ops)
            if chance < self.unsure.least:
                return EndBefore("unsure", chance, self.unsure.sentence(chance))
        return None

    def reason(self, sequence: Sequence, *, end: EndBefore | None, stopped: bool, is_last: bool) -> FinishReason | None:
        """Return why the text ends with its latest token, None where it goes on.

        Args:
            sequence: The text so far, with the latest token, unless the text ends before it.
            end: Why the text ends before the latest token; None where it does not.
            stopped: Whether a stop string is complete.
            is_last: Whether the latest token is the last of its step, up to which the grammar has taken tokens.
        """
        if stopped:
            return "stop"
        if end is not None:
            sequence.stats.chance_right = end.chance
            if end.note:
                sequence.stats.add_reason(end.note)
            self.note_grammar(sequence, end.reason)
            return end.reason
        if is_last and self.constraint is not None and self.constraint.is_complete:
            self.note_grammar(sequence, "stop")
            return "stop"
        is_longest = len(sequence.token_ids) - len(sequence.request.prompt_ids) == self.max_tokens
        if not is_longest and len(sequence.token_ids) < self.n_most:
            return None
        if is_last:
            self.note_grammar(sequence, "length")
        if not is_longest:
            sequence.stats.add_reason(f"the text ends because the context of {self.n_most} tokens is full")
        return "length"

    def note_grammar(self, sequence: Sequence, reason: FinishReason) -> None:
        """Note in a sequence that ends for this reason whether its text is one of its grammar's, and how that came."""
        if self.constraint is not None:
            sequence.is_whole = reason == "stop" or self.constraint.may_end
            if self.constraint.note:
                sequence.stats.add_reason(self.constraint.note)
