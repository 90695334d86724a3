"""The suffix drafter and its automaton, against counting by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding.simulation import a_text, context
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.draft import Draft, Verification
from edgedec.drafter import Store
from edgedec.drafters.suffix.automaton import SuffixAutomaton
from edgedec.drafters.suffix.matching import Match
from edgedec.drafters.suffix.suffix import SuffixDrafter, SuffixStore
from edgedec.errors import RequestError

CLIMB = 24  # contexts whose count a token raises
Text = list[int]

texts = st.lists(st.integers(0, 2), max_size=40)
short_texts = st.lists(st.integers(0, 2), max_size=CLIMB - 1)


def automaton_of(*added: Sequence[int]) -> SuffixAutomaton:
    """Return the automaton of texts that do not follow each other."""
    automaton = SuffixAutomaton()
    for text in added:
        automaton.last = 0
        for token in text:
            automaton.add(token)
    return automaton


def n_times(context: Sequence[int], *texts: Sequence[int]) -> int:
    """Count the places where a context stands."""
    n = len(context)
    return sum(list(text[i : i + n]) == list(context) for text in texts for i in range(len(text) - n + 1))


def followers(context: Sequence[int], *texts: Sequence[int]) -> set[int]:
    """Return the tokens that ever followed a context."""
    n = len(context)
    return {text[i + n] for text in texts for i in range(len(text) - n) if list(text[i : i + n]) == list(context)}


@pytest.mark.slow
@given(texts)
def test_the_last_state_links_to_the_longest_context_seen_before(text: Text) -> None:
    """Its length, and every token that followed it, are exact after each token."""
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.add(token)
        seen = text[:end]
        longest = next(seen[i:] for i in range(1, end + 1) if i == end or n_times(seen[i:], seen) > 1)
        state = automaton.link[automaton.last]
        assert automaton.length[state] == len(longest)
        assert set(automaton.next[state]) == followers(longest, seen)


@pytest.mark.slow
@given(st.lists(texts, max_size=4), texts)
def test_following_a_text_finds_its_longest_known_context(known: list[Text], text: Text) -> None:
    """Over several texts, added one after the other, no context runs from one into the next."""
    automaton = automaton_of(*known)
    match = Match(automaton)
    for end, token in enumerate(text, start=1):
        match.follow(token)
        longest = next(text[i:end] for i in range(end + 1) if i == end or n_times(text[i:end], *known))
        assert match.length == len(longest)
        assert set(automaton.next[match.state]) == followers(longest, *known)


def counts(automaton: SuffixAutomaton, text: Text) -> Iterator[tuple[int, Text]]:
    """Yield the count of each context of a text, and the context."""
    for i in range(len(text)):
        state = 0
        for end in range(i, len(text)):
            state = automaton.next[state][text[end]]
            yield automaton.count[state], text[i : end + 1]


@pytest.mark.slow
@given(short_texts, st.lists(texts, max_size=4))
def test_counts_are_exact_within_the_climb_and_never_too_high(text: Text, known: list[Text]) -> None:
    """How often a context stands in a text that is shorter than the climb; in others, or over several, at most that."""
    assert all(count == n_times(context, text) for count, context in counts(automaton_of(text), text))
    automaton = automaton_of(*known)
    assert all(count <= n_times(context, *known) for each in known for count, context in counts(automaton, each))


def test_a_monotonous_text_takes_two_states_a_token_at_most() -> None:
    """Memory is linear in the text, whatever it says."""
    for text in ([7] * 1000, [1, 2] * 500, a_text(1000), [i % 7 * (i % 11) for i in range(1000)]):
        assert len(automaton_of(text).next) <= 2 * len(text)


def drafter_of(prompt: Sequence[int], store: Store | None = None) -> SuffixDrafter:
    """Open a drafter on a prompt."""
    drafter = SuffixDrafter(context(store))
    drafter.begin(prompt)
    return drafter


def proposed(draft: Draft) -> list[tuple[int, int, float]]:
    """Return token, parent and rounded p of every node."""
    p = [round(p, 4) for p in list(draft.p_accept)]
    return list(zip(draft.tokens, list(draft.parents), p, strict=True))


def say(drafter: SuffixDrafter, token_ids: Sequence[int]) -> None:
    """Let the text go on."""
    for token in token_ids:
        drafter.learn(Verification((), (token,)), {})


def write(drafter: SuffixDrafter, token_ids: Sequence[int]) -> None:
    """Write a text to its end."""
    say(drafter, token_ids)
    drafter.close()


def test_what_followed_before_is_proposed_as_a_chain() -> None:
    """A match of three tokens is trusted 0.45, one of five 0.6; no more nodes than asked for."""
    drafter = drafter_of([1, 2, 3, 4, 1, 2, 3])
    assert proposed(drafter.propose(9, 0)) == [(4, -1, 0.45), (1, 0, 0.45), (2, 1, 0.6), (3, 2, 0.6)]
    assert proposed(drafter.propose(2, 0)) == [(4, -1, 0.45), (1, 0, 0.45)]
    assert proposed(drafter.propose(0, 0)) == []


def test_continuations_are_ranked_by_how_often_they_came() -> None:
    """After 1, 2 came 7 twice and 8 once."""
    drafter = drafter_of([1, 2, 7, 1, 2, 8, 1, 2, 7, 0, 1, 2])
    assert proposed(drafter.propose(2, 0)) == [(7, -1, 0.2), (8, -1, 0.1)]


@pytest.mark.parametrize("prompt", [[], [1], [1, 2, 3]])
def test_nothing_seen_twice_proposes_nothing(prompt: Text) -> None:
    """An empty draft."""
    assert len(drafter_of(prompt).propose(9, 0)) == 0


@pytest.mark.slow
@given(texts, st.lists(texts.filter(bool), max_size=3), st.integers(1, 20))
def test_every_proposal_is_a_draft_of_texts_seen(prompt: Text, said: list[Text], n_max: int) -> None:
    """It passes every check, and each path stands, after the text's last token, somewhere before."""
    drafter, text = drafter_of(prompt), list(prompt)
    for tokens in said:
        say(drafter, tokens)
        text += tokens
        draft = drafter.propose(n_max, 0)
        draft.check(n_vocab=3)
        assert len(draft) <= n_max
        paths: list[Text] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else text[-1:]), token])
            assert n_times(paths[-1], text)
        assert len({tuple(path) for path in paths}) == len(paths)


def test_later_requests_find_what_earlier_ones_said() -> None:
    """What was generated, not what was asked, and no text runs into another; until it is forgotten."""
    store = Store()
    write(drafter_of([8, 9], store), [1, 2, 3, 4, 5])
    write(drafter_of([9], store), [14, 15, 16])
    assert list(drafter_of([7, 1, 2, 3], store).propose(2, 0).tokens) == [4, 5]
    assert list(drafter_of([7, 14], store).propose(9, 0).tokens) == [15, 16]
    assert len(drafter_of([7, 4, 5], store).propose(9, 0)) == len(drafter_of([7, 8], store).propose(2, 0)) == 0
    store.clear()
    assert len(drafter_of([7, 1, 2, 3], store).propose(2, 0)) == 0


@pytest.mark.parametrize("n", [1, 7, 250])
def test_tokens_that_came_without_a_draft_are_read_at_the_next_one(n: int) -> None:
    """The first tokens are those of a drafter that was asked before each one; a text is not found at its own end."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3] * 30
    lazy, eager = drafter_of(text[:12], Store()), drafter_of(text[:12], Store())
    lazy.learn(Verification((), tuple(text[12 : 12 + n])), {})
    for token in text[12 : 12 + n]:
        eager.propose(8, 0)
        eager.learn(Verification((), (token,)), {})
    assert lazy.propose(8, 0).tokens[:2] == eager.propose(8, 0).tokens[:2] == tuple(text[12 + n : 14 + n])


def test_of_very_many_unread_tokens_the_last_ones_are_read() -> None:
    """The text goes on with them, and what is drafted follows them."""
    drafter, end = drafter_of(a_text(20), Store()), [1, 2, 3, 4, 5, 1, 2, 3]
    drafter.learn(Verification((), (*a_text(3000, 1), *end)), {})
    assert drafter.propose(2, 0).tokens == (4, 5)
    assert drafter.memory_bytes() < 20 * 420 * 2 + 300 * 420 * 4


def test_the_store_keeps_to_its_bytes_and_drops_the_oldest() -> None:
    """Two generations of texts, of which the older goes when the younger is half of the limit."""
    budget = 400_000
    store = Store(budget)
    said = [a_text(120, seed) for seed in range(30)]
    one = SuffixAutomaton.memory_bytes(automaton_of(said[0]))
    for text in said:
        write(drafter_of([0], store), text)
        kept = store["suffix"]
        assert isinstance(kept, SuffixStore)
        assert kept.memory_bytes() <= budget // 2 + 2 * one
    assert list(drafter_of(said[-1][:5], store).propose(3, 0).tokens) == said[-1][5:8]
    assert len(drafter_of(said[0][:5], store).propose(3, 0)) == 0


@pytest.mark.parametrize("budget", [0, 100_000])
def test_a_long_prompt_keeps_to_the_budget(budget: int) -> None:
    """The text begins anew where it would hold more than its half; proposals go on."""
    drafter = drafter_of([*a_text(5000), 1, 2, 3, 1, 2], Store(budget))
    assert drafter.memory_bytes() <= budget + 10_000
    if budget:
        assert list(drafter.propose(1, 0).tokens) == [3]


def waiting(said: Sequence[Text], budget: int | None = None) -> list[Text]:
    """Return the texts that a store has for a file after these were written, which it gives once."""
    store = Store(budget)
    for text in said:
        write(drafter_of([8, 9], store), text)
    kept = store["suffix"]
    assert isinstance(kept, SuffixStore)
    outputs = [text.tolist() for text in kept.take_outputs()]
    assert kept.take_outputs() == []
    return outputs


def test_a_store_has_its_outputs_for_a_file() -> None:
    """The texts of requests that said something, oldest first, and no prompt; as many as the store's bytes allow."""
    assert waiting([[1, 2], [], [3]]) == [[1, 2], [3]]
    texts = [a_text(120, seed) for seed in range(30)]
    left = waiting(texts, 400_000)
    assert left == texts[30 - len(left) :]
    assert 2 <= len(left) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("ignore_end", [False, True])
def test_nothing_behind_an_end_token_is_learned(tmp_path: Path, ignore_end: bool) -> None:
    """A draft that goes on behind it is cut there, unless end tokens are ignored; the text is plain decoding's."""
    path = tiny_llama(tmp_path / "m.gguf", n_embd=32, n_ff=48)
    with edgedec.load(path, runtime="reference", draft="suffix") as engine, pytest.MonkeyPatch.context() as patch:
        whole = engine.generate("Once", max_tokens=40, temperature=0, ignore_end=True).token_ids
        end = next(i for i in range(20, 40) if whole[i] not in whole[:i])
        patch.setattr(type(engine.tokenizer), "is_end", lambda self, token_id: token_id == whole[end])
        plain = engine.generate("Once", max_tokens=40, temperature=0, draft=False, ignore_end=ignore_end)
        assert plain.token_ids == (whole if ignore_end else whole[:end])
        drafted = engine.generate("Once", max_tokens=40, temperature=0, ignore_end=ignore_end)
        assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert drafted.stats.n_accepted_tokens > 10
        store = engine.pool.slots[0].drafting.store["suffix"]  # type: ignore[union-attr]
        learned = tuple(store.take_outputs()[-1])
    assert learned == (whole if ignore_end else whole[: end + 1])


@pytest.mark.slow
def test_a_prediction_is_looked_up(tmp_path: Path) -> None:
    """A right prediction makes drafts from the first token on; right, half right or wrong, the text is the same."""
    path = tiny_llama(tmp_path / "m.gguf", n_embd=32, n_ff=48)
    with edgedec.load(path, runtime="reference", draft="suffix") as engine:
        plain = engine.generate("Once", max_tokens=40, seed=1, ignore_end=True, draft=False)
        right = plain.token_ids
        n_accepted = []
        for prediction in (None, right, (*right[:20], 5, 5, *right[20:]), "Something else.", right[::-1], ()):
            engine.forget()
            drafted = engine.generate("Once", max_tokens=40, seed=1, ignore_end=True, prediction=prediction)
            assert drafted.token_ids == right
            n_accepted.append(drafted.stats.n_accepted_tokens)
        assert n_accepted[1] > max(n_accepted[0] + 10, n_accepted[2] - 5)
        assert n_accepted[2] > n_accepted[0] + 10
        assert (
            engine.generate("Once", max_tokens=40, seed=1, ignore_end=True, prediction=right, draft=False).token_ids
            == right
        )
        for wrong in ((99999,), 3, b"x"):
            with pytest.raises(RequestError):
                engine.generate("Once", prediction=wrong)  # type: ignore[arg-type]


def test_a_prediction_keeps_to_the_budget() -> None:
    """Of a long prediction only the beginning is learned, and the memory that it takes is told."""
    text = a_text(50_000, seed=3)
    drafter = SuffixDrafter(replace(context(Store(1_000_000)), predicted=tuple(text)))
    empty = drafter.memory_bytes()
    drafter.begin([1, 2, 3])
    assert empty < drafter.memory_bytes() <= 1_000_000
