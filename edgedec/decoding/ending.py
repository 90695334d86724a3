"""Where a text ends: by an end token, a stop string, its grammar, max_tokens, doubt, or because the context is full."""

import codecs
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from edgedec import plugins
from edgedec.constraint import Constraint
from edgedec.draft import Verification
from edgedec.model import Forward, Session
from edgedec.sequence import FinishReason, Request, TextState
from edgedec.text_method import EarlyEnd, EndBefore


class TextStream:
    """Turns the bytes of tokens into text, token by token.

    A character and a stop string may span several tokens: text is returned only when it can no longer become part of
    either. Bytes that are not UTF-8 become U+FFFD.

    Attributes:
        stopped: The stop string that ended the text; None while there is none.

    >>> stream = TextStream(stop=["END"])
    >>> stream.feed("hé".encode()[:2]), stream.feed("hé".encode()[2:]), stream.feed(b" E"), stream.feed(b"N!")
    ('h', 'é', ' ', 'EN!')
    >>> stream.feed(b"xEN"), stream.feed(b"DING"), stream.stopped
    ('x', '', 'END')
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = _StopStrings(stop) if stop else None
        self._place = 0
        self._held = ""
        self.stopped: str | None = None

    def feed(self, data: bytes) -> str:
        """Take the bytes of a token and return the text that has become certain."""
        text = self._decoder.decode(data)
        return text if self._stops is None else self._release(text, self._stops)

    def finish(self) -> str:
        """End the text and return what was held back."""
        text = self._decoder.decode(b"", final=True)
        if self._stops is not None:
            text = self._release(text, self._stops)
        if self.stopped is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str, stops: "_StopStrings") -> str:
        if self.stopped is not None:
            return ""
        text, place = self._held + new, self._place
        for end, character in enumerate(new, len(self._held) + 1):
            place = stops.step(place, character)
            if n := stops.n_matched[place]:
                self.stopped, self._held = text[end - n : end], ""
                return text[: end - n]
        self._place = place
        n_certain = len(text) - stops.depth[place]
        self._held = text[n_certain:]
        return text[:n_certain]


class _StopStrings:
    """Finds the first of several strings in one pass, however many there are (Aho and Corasick 1975, CACM 18:6).

    A place stands for the longest end of the text that is the beginning of one of the strings; place 0 for no such end.

    Attributes:
        depth: By place, the length of that end.
        n_matched: By place, the length of the longest string that ends there; 0 where none does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # by place, the place of the next shorter such end
        self.depth, self.n_matched = [0], [0]
        for string in strings:
            self._add(string)
        row = list(self._next[0].values())
        while row:
            row = [following for place in row for following in self._link(place)]

    def step(self, place: int, character: str) -> int:
        """Return the place after one more character."""
        while place and character not in self._next[place]:
            place = self._shorter[place]
        return self._next[place].get(character, 0)

    def _add(self, string: str) -> None:
        place = 0
        for character in string:
            if character not in self._next[place]:
                self._next[place][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[place] + 1)
                self.n_matched.append(0)
            place = self._next[place][character]
        self.n_matched[place] = len(string)

    def _link(self, place: int) -> list[int]:
        """Find the shorter ends of the places that follow `place`, whose own is known, and return these places."""
        for character, following in self._next[place].items():
            shorter = self.step(self._shorter[place], character)
            self._shorter[following] = shorter
            self.n_matched[following] = self.n_matched[following] or self.n_matched[shorter]
        return list(self._next[place].values())


def _never(token_id: int) -> bool:
    return False


_END_TOKEN = EndBefore("stop")


@dataclass(frozen=True, slots=True)
class Added:
    """What a step adds to a text, up to where the text ends.

    Attributes:
        verification: The tokens; the last one is no part of the text where the text ends before it.
        texts: By token, the text that has become certain with it.
        logprobs: By token, the constraint's log-probability of the text up to it; empty without a constraint.
        before: Why the text ends before the last token; None where it does not.
        reason: Why the text ends with the step; None where it goes on.
    """

    verification: Verification = field(default_factory=lambda: Verification((), ()))
    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    before: EndBefore | None = None
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Decides where the text of one generation ends; by default it never does.

    Attributes:
        is_end: `(token_id)` -> whether the token ends the text.
        max_tokens: Most tokens to generate; None for no limit.
        n_most: Most tokens of the text, the prompt included, that the session takes.
        constraint: The grammar that the text keeps to, or None.
        early: May end the text before a token, by methods of the request.
        temperature: At which the constraint's log Z is counted.
        text: Turns tokens into text, and finds the stop string that ends it.
        piece: `(token_id)` -> the token's bytes.
    """

    is_end: Callable[[int], bool] = _never
    max_tokens: int | None = None
    n_most: int = sys.maxsize
    constraint: Constraint | None = None
    early: tuple[EarlyEnd, ...] = ()
    temperature: float = 1.0
    text: TextStream = field(default_factory=TextStream)
    piece: Callable[[int], bytes] = lambda token_id: b""

    @classmethod
    def of(cls, request: Request, session: Session, constraint: Constraint | None) -> "TextEnd":
        """Return what decides about the text of a request on a session."""
        is_end = _never if request.sampling.ignore_end else session.model.tokenizer.is_end
        temperature, n_most = request.sampling.temperature or 1.0, session.n_ctx
        if request.sampling.max_tokens is not None:
            n_most = min(n_most, len(request.prompt_ids) + request.sampling.max_tokens)
        text, piece = TextStream(request.sampling.stop), cache(session.model.tokenizer.piece)
        methods, least, card = request.methods, request.sampling.stop_unsure, session.model.card
        methods = methods if least is None else {**methods, "stop_unsure": least}
        made = {name: plugins.load_plugin(plugins.TEXT_METHODS, name)(session.model.tokenizer) for name in methods}
        ends = (method.early_end(methods[name], card) for name, method in made.items())
        early = tuple(end for end in ends if end is not None)
        return cls(is_end, request.sampling.max_tokens, n_most, constraint, early, temperature, text, piece)

    def cut(self, verification: Verification, forward: Forward, n_before: int) -> Added:
        """Return what a step adds to the text, up to the token that ends it; the grammar takes these tokens.

        What a draft had behind the end is no text, so nothing may count or learn it. Where the grammar puts another
        token in the place of a token, the step ends there, too.

        Args:
            verification: What was verified.
            forward: The forward that it was verified with. Row 0 of its logits is that of the first token, row i + 1
                that of the token behind node i.
            n_before: Tokens of the text before the step, the prompt included.
        """
        path, token_ids, constraint = verification.path, verification.token_ids, self.constraint
        rows = [0, *[node + 1 for node in path]] if path else [0]
        masses, logits, n = list[float](), forward.logits, len(token_ids)
        if constraint is not None:  # log Z of each row, by the masks that were drawn with: before any is committed
            at = self.temperature
            masses = [constraint.log_mass(logits[rows[i]], token_ids[:i], at, forward.ops) for i in range(n)]
        texts, logprobs, before, reason = list[str](), list[float](), None, None
        for i, token_id in enumerate(token_ids):
            taken = token_id if constraint is None else constraint.commit(token_id)
            if constraint is not None:
                constraint.logprob += masses[i]
                logprobs.append(constraint.logprob)
            before = _END_TOKEN if self.is_end(taken) else None
            if before is None and self.early:
                ends = (early.before(logits[rows[i]], taken, forward.ops) for early in self.early)
                before = next(filter(None, ends), None)
            texts.append(self.text.feed(self.piece(taken)) if before is None else "")
            reason = self._reason(before, n_before + i + 1)
            if reason is not None or taken != token_id:
                verification = Verification(path[:i], (*token_ids[:i], taken))
                break
        return Added(verification, tuple(texts), tuple(logprobs), before, reason)

    def begin(self, token_ids: Sequence[int], n_before: int) -> Added:
        """Return what tokens add to a text that is begun with them, up to where it ends; the grammar takes them."""
        texts, reason = list[str](), None
        for token_id in token_ids:
            if self.constraint is not None:
                self.constraint.commit(token_id)
            texts.append(self.text.feed(self.piece(token_id)))
            reason = self._reason(None, n_before + len(texts))
            if reason is not None:
                break
        return Added(Verification((), tuple(token_ids[: len(texts)])), tuple(texts), reason=reason)

    def _reason(self, before: EndBefore | None, n_tokens: int) -> FinishReason | None:
        """Return why a text of so many tokens, the prompt included, ends with its latest one; None where it goes on."""
        if before is not None:
            return before.reason
        if self.text.stopped is not None or (self.constraint is not None and self.constraint.is_complete):
            return "stop"
        return "length" if n_tokens >= self.n_most else None

    def note(self, text: TextState, added: Added) -> None:
        """Note in the state of a text how it ended with a step."""
        if added.before is not None:
            text.stats.chance_right = added.before.chance
            if added.before.note:
                text.stats.add_note(added.before.note)
        elif self.text.stopped is not None:
            return  # what stands before a stop string need not be a text of the grammar
        elif added.reason == "length" and text.n_generated != self.max_tokens:
            text.stats.add_note(f"the text ends because the context of {self.n_most} tokens is full")
        if added.reason is not None:
            self.note_grammar(text, added.reason)

    def note_grammar(self, text: TextState, reason: FinishReason) -> None:
        """Note in a text that ends for this reason whether it is one of its grammar's, and how that came."""
        if self.constraint is not None:
            text.is_whole = reason == "stop" or self.constraint.may_end
            cut = self.constraint.note_if_cut if reason == "length" and not text.is_whole else ""
            for note in filter(None, (self.constraint.note, cut)):
                text.stats.add_note(note)
