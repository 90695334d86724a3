"""What a draft head on the cpu runtime knows of a session's text, and its calls, which several sessions share."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from copy import copy
from ctypes import addressof, c_float
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import DraftPrice, SharedForward
from edgedec.errors import ModelFormatError, SessionError, argument
from edgedec.head_state import ChainRules, DraftCall, DraftedChain, JoinedCalls
from edgedec.logit_ops import LogitOps
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.cpu.draft_head.parts import first_rows
from edgedec_runtimes.cpu.draft_head.weights import CpuDraftHead
from edgedec_runtimes.cpu.library import NOT_FINITE, Drafted, DraftItem, DraftRules, address, check, native
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.row_places import best_places

_LONGEST_S = 3600.0
_LONGEST = 2**31 - 1
_CHAINS, _SCORES = "ec_draft_chains", "ec_draft_scores"
_DRAFTED = -1  # in place of n_past: the token was drafted behind what the last call read

_NO_CHAIN = DraftedChain((), (), (), (), ())

F32 = NDArray[np.float32]


class CpuHeadCall:
    """Implements edgedec.head_state.DraftCall: a native function, and one of the texts that it is called for.

    Attributes:
        kind: The name of the native function.
        n_rows: 1.
        item: The text, and the result.
    """

    n_rows = 1

    def __init__(self, state: "CpuDraftHeadState", kind: str, item: ctypes.Structure, *pointed_to: object) -> None:
        self.kind = kind
        self.item = item
        self._state = state
        self._pointed_to = pointed_to

    def answer(self, others: Sequence[DraftCall]) -> None:
        """Draft for this text and those of other calls of the same kind, together; see DraftCall."""
        calls = [self, *[call for call in others if isinstance(call, CpuHeadCall)]]
        with self._state.using():  # which holds the model's lock, so that the others stay open
            for call in calls[1:]:
                with call._state.using():
                    pass
            items = (DraftItem * len(calls))(*[call.item for call in calls])
            if code := getattr(native(), self.kind)(items, len(calls)):
                self._state._check(code)
            for call, item in zip(calls, items, strict=True):
                call.item.n_found = item.n_found


class CpuDraftHeadState:
    """Implements edgedec_runtimes.shared.own_session.Follower over a native session.

    Args:
        session: The native session.
        ops: Operations on a row of the target's logits.

    Attributes:
        head: The head that follows the session.
        using: Holds the model's lock inside its block, and refuses a closed session.
        token_ids, ops, notes, shared: See HeadState.
        evaluated: The forwards of the latest call; each token of a chain counts as one, a block with its first token.
    """

    def __init__(
        self,
        head: CpuDraftHead,
        session: ctypes.c_void_p,
        using: Callable[[], AbstractContextManager[object]],
        ops: LogitOps,
    ) -> None:
        self.head = head
        self._session = session
        self.using = using
        self.ops = ops
        self.token_ids, self.notes = head.token_ids, head.notes
        head.followers.add(self)
        self._scores = np.empty(len(head.token_ids), np.float32)
        self._place: Callable[[int], int] | None = None
        self._joined: JoinedCalls | None = None
        self.shared = SharedForward()
        self.evaluated: list[tuple[int, float]] = []

    @property
    def summary(self) -> str:
        """The head's name and the bytes of its weights, for a person."""
        return f"the draft head {self.head.card.name} ({format_bytes(self.head.n_bytes)})"

    @property
    def reach(self) -> tuple[float, ...]:
        """The chance that a draft is right up to its first, second, ... token, as its trainer measured."""
        promise = self.head.card.promise
        return () if promise is None else promise.reach

    def arrange(self, cost: Callable[[int], float] | None) -> str | None:
        """Place the rows of a row head where they promise most; other heads add nothing to forwards."""
        rows = self.head.card.rows
        if rows is None:
            return None
        n_most = (rows.n + 1) ** 2
        costs = tuple([1.0 if cost is None else round(cost(n) / cost(1), 2) for n in range(1, n_most + 1)])
        placed = best_places(self.reach or UNKNOWN_REACH, rows.n, self.head.below, costs)
        pays = cost is None or placed.speed >= LEAST_SPEED
        counts = (ctypes.c_int32 * (rows.n + 1))(*(placed.counts if pays else ()))
        seconds = 0.0 if cost is None else placed.extra * cost(1)
        with self.using():
            check(
                native().ec_draft_place(self._session, addressof(counts), len(counts), seconds), "rows of a draft head"
            )
        if pays:
            return None
        speed = f"{placed.speed:.2f} of the plain speed is expected, and {LEAST_SPEED} is wanted"
        return f"the rows of the draft head {self.head.card.name} don't pay here: {speed}"

    def judge(self, n_drafts: int, n_right: int) -> str | None:
        """Return a sentence where the head accepts far less than its card promises."""
        return accepts_too_little(self.head.card, (n_drafts,), (n_right,))

    @property
    def price(self) -> DraftPrice:
        """What a draft is expected to take, by the bytes that it reads of those that a token of the target reads."""
        return self.head.price

    @property
    def read_s(self) -> float:
        """Seconds that the head has spent on the text so far, drafts not included."""
        with self.using():
            return float(native().ec_draft_read_seconds(self._session))

    @property
    def n_bytes(self) -> int:
        """Bytes of what the head knows of the text."""
        with self.using():
            return int(native().ec_draft_state_bytes(self._session))

    def reset(self) -> None:
        """Know nothing of the text so far; call it with the model's lock held."""
        handle = None if self.head.closed else self.head.handle
        check(native().ec_session_follow(self._session, handle), "a draft head of a session")

    @property
    def held_bytes(self) -> int:
        """Bytes of the head's weights, and of what it knows of all sessions' texts."""
        with ExitStack() as held:
            return self.head.n_bytes + sum(state.n_bytes for state in self._open_states(held))

    @property
    def gone(self) -> bool:
        """Whether the head was freed."""
        return self.head.closed

    def let_go(self) -> None:
        """Free the head's weights and what it knows of all sessions' texts; see HeadState."""
        with ExitStack() as held:
            states = self._open_states(held)
            if not self.head.closed:
                for state in states:
                    state.rest()
                self.head.close()

    def _open_states(self, held: ExitStack) -> list["CpuDraftHeadState"]:
        """Return the states of all sessions that are not closed, maybe without this one; `held` keeps them open."""
        states = []
        for state in list(self.head.followers):
            with suppress(SessionError):
                held.enter_context(state.using())
                states.append(state)
        return states

    def rest(self) -> None:
        """Stop following the text."""
        with self.using():
            check(native().ec_session_follow(self._session, None), "a draft head of a session")

    def follow(self) -> None:
        """Follow the text again after rest(); see HeadState."""
        with self.using():
            if not self.head.closed and not native().ec_draft_saved_bytes(self._session, 0):
                self.reset()

    def chain(self, n_past: int, token: int, rules: ChainRules) -> DraftedChain:
        """Draft what follows `token`; see HeadState."""
        if self._place is not None:
            n_past = self._place(n_past)
        self.evaluated = []
        if n_past < 0 or rules.n_max < 1:
            return _NO_CHAIN
        edges = (c_float * len(rules.edges))(*rules.edges)
        factors = None if rules.factors is None else (c_float * len(rules.factors))(*rules.factors)
        most_s, of_factors = min(rules.most_s, _LONGEST_S), None if factors is None else addressof(factors)
        native_rules = DraftRules(rules.n_max, len(edges), addressof(edges), of_factors, rules.least_path, most_s)
        nodes = (Drafted * rules.n_max)()
        item = DraftItem(self._session, n_past, token, native_rules, nodes)
        chains = nodes[: self._called(_CHAINS, item, edges, factors)]
        if not chains:
            return _NO_CHAIN
        self.evaluated = [self._begun(rules.n_max), *[(1, self.price.level)] * (len(chains) - 1)]
        return DraftedChain(
            *zip(*[(node.token, node.p, node.second_token, node.second_p, node.sure) for node in chains], strict=True)
        )

    def begin(self, n_past: int, token: int) -> F32 | None:
        """Return the scores of what follows `token`; see HeadState."""
        if self._place is not None:
            n_past = self._place(n_past)
        self.evaluated = []
        return None if n_past < 0 else self._scored(n_past, token, self._begun(_LONGEST))

    def next(self, token: int) -> F32 | None:
        """Return the scores of what follows one more drafted token."""
        return self._scored(_DRAFTED, token, (1, self.price.level))

    def _begun(self, n_drafts: int) -> tuple[int, float]:
        """Return the rows and the price of a draft of at most so many tokens up to the first one."""
        return first_rows(self.head.card.block, n_drafts), self.price.of(1)

    def branches(self, tokens: Sequence[int], parents: Sequence[int], n_new: int) -> F32 | None:
        """Return the scores of what follows each of the last nodes of a drafted tree; see HeadState."""
        nodes, above = np.array(tokens, np.int32), np.array(parents, np.int32)
        if not 0 < n_new <= len(nodes) == len(above):
            raise ValueError(f"a tree of {len(nodes)} nodes and {len(above)} parents can't have {n_new} new nodes")
        scores = np.empty((n_new, len(self.head.token_ids)), np.float32)
        n_found, begun = ctypes.c_int32(), perf_counter()
        with self.using():
            arguments = (address(nodes), address(above), len(nodes), n_new, address(scores), ctypes.byref(n_found))
            self._check(native().ec_draft_branches(self._session, *arguments))
        self.shared = SharedForward(perf_counter() - begun, 1, 1)
        self.evaluated = [(n_new, self.price.level)] if n_found.value else []
        return scores if n_found.value else None

    def _check(self, code: int) -> None:
        """Raise the error of a native call that drafted."""
        if code == NOT_FINITE:
            raise ModelFormatError(
                f"a score of the draft head {self.head.card.name} is infinite or no number; its file was changed or "
                f"damaged, or it was trained for another model: choose another head ({argument('draft_head')}), or "
                "'off' for none"
            )
        check(code, "drafting")

    def _scored(self, n_past: int, token: int, evaluated: tuple[int, float]) -> F32 | None:
        item = DraftItem(self._session, n_past, token, scores=address(self._scores))
        scores = self._called(_SCORES, item)
        self.evaluated = [evaluated] if scores else []
        return self._scores if scores else None

    def _called(self, kind: str, item: ctypes.Structure, *pointed_to: object) -> int:
        """Answer a call, together with other sessions' calls where they are joined; return what was found.

        The arrays that the item points to are `pointed_to`, and those of this object.
        """
        call = CpuHeadCall(self, kind, item, *pointed_to)
        if self._joined is not None:
            self.shared = self._joined(call)
        else:
            begun = perf_counter()
            call.answer(())
            self.shared = SharedForward(perf_counter() - begun, 1, 1)
        return int(call.item.n_found)

    def seen_by(
        self, *, place: Callable[[int], int] | None = None, joined: JoinedCalls | None = None
    ) -> "CpuDraftHeadState":
        """Return the same head for a session around the one that it follows; see HeadState."""
        twin = copy(self)
        twin._place = place or self._place
        twin._joined = joined or self._joined
        return twin

    def page_bytes(self) -> int:
        """Return the bytes of a page of the head's keys and values; 0 where the head rests or was freed."""
        return int(native().ec_draft_page_bytes(self._session))

    def saved_pages(self, begin: int, end: int, n_bytes: int) -> NDArray[np.uint8] | None:
        """Return the head's keys and values of the slots [begin, end), in whole pages; None while some are not read."""
        data, saved = np.empty(n_bytes, np.uint8), ctypes.c_int32()
        code = native().ec_draft_save_pages(self._session, begin, end, address(data), n_bytes, ctypes.byref(saved))
        check(code, "saving a draft head")
        return data if saved.value else None

    def take_pages(self, begin: int, end: int, data: NDArray[np.uint8]) -> None:
        """Know what saved_pages() returned, of pages one after another from slot 0 on."""
        code = native().ec_draft_load_pages(self._session, begin, end, address(data), data.nbytes)
        check(code, "restoring a draft head")

    def saved(self, n_tokens: int) -> bytes:
        """Return what the head knows of the first tokens; call it with the model's lock held."""
        data = np.empty(native().ec_draft_saved_bytes(self._session, n_tokens), np.uint8)
        if data.nbytes:
            check(native().ec_draft_save(self._session, n_tokens, address(data), data.nbytes), "saving a draft head")
        return self.head.mark + data.tobytes()

    def restore(self, data: bytes, n_tokens: int) -> None:
        """Know what saved() returned; what another head saved is dropped. Call it with the model's lock held."""
        self.reset()
        mark = self.head.mark
        payload = np.frombuffer(data, np.uint8)[len(mark) :]
        n_bytes = native().ec_draft_saved_bytes(self._session, n_tokens)
        if n_bytes and data.startswith(mark) and payload.nbytes == n_bytes:
            check(native().ec_draft_load(self._session, n_tokens, address(payload), n_bytes), "restoring a draft head")


LEAST_SPEED = 1.1
"""Of plain decoding, that the rows of a row head must promise: with less, a small model's texts lost up to a tenth
(`benchmarks/speed/head_kinds.py`)."""
N_DRAFTS = 200
"""Drafts after which a head is judged."""
SHARE = 0.25
"""The least part of what its card promises that a head must accept.

A sound head can accept a third of it on texts of a kind that it never saw: the one that is shipped did on summaries of
long articles. With wrong taps it is a hundredth to a tenth.
"""
UNKNOWN_REACH = (0.3,)
"""What a head without a promise is held to. Of public heads, the first drafted token of the weakest that was trained as
meant is accepted in 0.34 of cases (speculators' example with 5,000 conversations), and in 0.04 with wrong taps (vllm,
pull request 50170)."""


def accepts_too_little(card: HeadCard, n_drafted: Sequence[int], n_accepted: Sequence[int]) -> str | None:
    """Return a sentence on a head that accepts under a quarter of what its card promises; None while it does not.

    Args:
        card: The head's card.
        n_drafted: Drafts that were verified with at least one, two, three, ... tokens of the head.
        n_accepted: How many of these drafts were accepted up to their first, second, third, ... token.

    >>> from edgedec_runtimes.trained_heads.card import Promise
    >>> card = HeadCard("h", 8, 8, 8, 1, 1, 8, 1e-6, 1e4, (1,), 4, 4, promise=Promise((0.5, 0.2)))
    >>> accepts_too_little(card, [199, 100], [0, 0]), accepts_too_little(card, [200, 100], [25, 5])
    (None, None)
    >>> print(accepts_too_little(card, [200, 100], [24, 5]))
    the draft head h rests: 29 of its 300 tokens in 200 steps were accepted, where its card promises 120
    """
    if not n_drafted or n_drafted[0] < N_DRAFTS:
        return None
    reach = UNKNOWN_REACH if card.promise is None else card.promise.reach
    depth = min(len(reach), len(n_drafted), len(n_accepted))
    expected = sum(n * p for n, p in zip(n_drafted[:depth], reach, strict=False))
    accepted, drafted = sum(n_accepted[:depth]), sum(n_drafted[:depth])
    if accepted >= SHARE * expected:
        return None
    said = "its card promises" if card.promise is not None else "a sound head has about"
    return (
        f"the draft head {card.name} rests: {accepted} of its {drafted} tokens in {n_drafted[0]} steps were accepted, "
        f"where {said} {round(expected)}"
    )
