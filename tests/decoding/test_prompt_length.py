"""Prompts: one that can't fit is refused before it is tokenized; what of a KV cache one may go on from."""

import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import Lossy
from edgedec.decoding.reading import remember_cached, reuse_prefix
from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import PromptTooLongError
from edgedec.model_card import Capabilities
from edgedec.sampling import SamplingParams
from edgedec.sequence import Request, TextState

MB = 1_000_000
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module", params=["cpu", "llamacpp", "reference"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgedec.Engine]:
    """A tiny model, whose tokens are single bytes, with a context of 256 tokens."""
    path = tiny_llama(tmp_path_factory.mktemp("length") / "tiny.gguf", n_layer=1, chat_template=CHAT)
    with edgedec.load(path, runtime=request.param, n_ctx=256, draft="off", offline=True) as engine:
        yield engine


def chat_of(content: str) -> list[dict[str, Any]]:
    """Return a chat of one message."""
    return [{"role": "user", "content": content}]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["中" * 500_000, "a b " * 500_000], ids=["one word", "many words"])
@pytest.mark.parametrize("ask", ["generate", "chat"])
def test_what_can_not_fit_is_not_tokenized(tiny: edgedec.Engine, ask: str, text: str) -> None:
    """A text of 1.5 or 2 MB is refused within a few copies of it; to tokenize it took hundreds of MB.

    The number of tokens that is named is not below the text's, of which each is a byte.
    """
    prompt: Any = text if ask == "generate" else chat_of(text)
    call: Callable[[Any], object] = getattr(tiny, ask)
    with pytest.raises(PromptTooLongError):
        call(prompt)  # what is made once is made now
    tracemalloc.start()
    try:
        with pytest.raises(PromptTooLongError) as refused:
            call(prompt)
        assert tracemalloc.get_traced_memory()[1] < 16 * MB
    finally:
        tracemalloc.stop()
    found = re.match(r"the prompt takes about (\d+) tokens; the context of 256 ", str(refused.value))
    assert found is not None
    n_bytes = len(text.encode())
    assert n_bytes < int(found[1]) < 1.2 * n_bytes


def test_what_fits_exactly(tiny: edgedec.Engine) -> None:
    """A prompt of one token less than the context is taken, one of as many is refused with its exact length."""
    n_extra = len(tiny.prompt_ids("a")) - 1
    fitting = "a" * (255 - n_extra)
    assert len(tiny.prompt_ids(fitting)) == 255
    assert len(tiny.generate(fitting, max_tokens=1, ignore_end=True).token_ids) == 1
    with pytest.raises(PromptTooLongError, match="the prompt takes 256 tokens; the context of 256 "):
        tiny.generate(fitting + "a", max_tokens=1)


@pytest.mark.slow
def test_a_chat_of_too_many_messages_is_not_rendered(tiny: edgedec.Engine) -> None:
    """More messages than the context has tokens, and than 4,096, are refused before the template sees them."""
    tracemalloc.start()
    try:
        with pytest.raises(PromptTooLongError, match=r"the chat has 4097 messages; .* it may have 4096"):
            tiny.chat(chat_of("") * 4097)
        assert tracemalloc.get_traced_memory()[1] < MB
    finally:
        tracemalloc.stop()
    with pytest.raises(PromptTooLongError, match="the prompt takes about "):
        tiny.chat(chat_of("") * 4096)


def test_turns_are_left_out_of_a_chat_that_is_much_too_long(tiny: edgedec.Engine) -> None:
    """What is much too long to be tokenized whole is still cut to what fits, turn by turn."""
    answer = {"role": "assistant", "content": "x"}
    turns = [each for i in range(20) for each in (*chat_of(f"{i} " * 5000), answer)]
    kept, n_dropped = tiny.fit_messages([*turns, *chat_of("short")], 32)
    assert (kept, n_dropped) == (chat_of("short"), 40)


def test_a_context_that_slides_takes_longer_prompts(tmp_path: Path) -> None:
    """Where the context slides a prompt may be longer than it."""
    path = tiny_llama(tmp_path / "tiny.gguf", n_layer=1)
    with edgedec.load(path, runtime="cpu", n_ctx=64, lossy=Lossy(slide=True), draft="off", offline=True) as engine:
        assert len(engine.generate("a" * 2000, max_tokens=3, ignore_end=True).token_ids) == 3


HELD = tuple(range(10))


def slot_of(n_held: int, n_exact: int, *, chunk: int = 1, rollback: bool = True) -> SessionSlot:
    """Return a slot whose session holds tokens of HELD."""

    class Held:
        n_cached = n_held

        class model:
            capabilities = Capabilities(prefill_chunk=chunk, rollback=rollback)

            class tokenizer:
                piece = staticmethod(lambda token_id: b"x")

    session: Any = Held()
    return SessionSlot(session, list(HELD[:n_held]), n_exact)


def text_of(prompt: tuple[int, ...], reuse: Any = "exact") -> TextState:
    """Return a text that begins with its prompt."""
    return TextState(Request(prompt, SamplingParams(), 1, reuse), list(prompt))


@pytest.mark.parametrize(
    ("prompt", "reuse", "n_exact", "chunk", "expected"),
    [
        ((*HELD, 80, 81), "longest", 7, 4, (10, 7)),
        ((*HELD, 80, 81), "exact", 7, 4, (4, 4)),
        ((*HELD, 80, 81), "exact", 7, 1, (7, 7)),
        (HELD, "longest", 10, 1, (9, 9)),
        ((*HELD[:5], 80, 81), "longest", 10, 1, (5, 5)),
        ((*HELD[:5], 80, 81), "exact", 10, 4, (4, 4)),
        ((80, *HELD), "longest", 10, 1, (0, 0)),
    ],
)
def test_a_prompt_goes_on_from_what_it_shares(
    prompt: tuple[int, ...], reuse: str, n_exact: int, chunk: int, expected: tuple[int, int]
) -> None:
    """All but its last token; "exact" only what a cold start would have read in the same pieces to the same bits."""
    slot, text = slot_of(10, n_exact, chunk=chunk), text_of(prompt, reuse)
    reuse_prefix(slot, text)
    assert (text.n_cached, slot.n_exact) == expected
    assert (text.stats.n_reused_tokens, slot.cached_ids) == (expected[0], list(prompt[: expected[0]]))


@pytest.mark.parametrize(("prompt", "n_reused"), [((*HELD, 80), 10), ((*HELD[:9], 80, 81), 0)])
def test_a_session_that_can_not_go_back_is_gone_on_from_whole(prompt: tuple[int, ...], n_reused: int) -> None:
    """Or not at all."""
    slot, text = slot_of(10, 10, rollback=False), text_of(prompt)
    reuse_prefix(slot, text)
    assert text.n_cached == n_reused


@pytest.mark.parametrize(
    ("n_reused", "n_exact", "chunk", "expected"),
    [(0, 0, 4, 8), (4, 4, 4, 8), (0, 0, 1, 13), (6, 4, 4, 4), (2, 4, 4, 2)],
)
def test_exact_is_what_was_read_from_an_exact_place_on(n_reused: int, n_exact: int, chunk: int, expected: int) -> None:
    """Of a prompt of 10 tokens its whole pieces; where rows do not depend on the pieces, what was written, too."""
    slot, text = slot_of(10, n_exact, chunk=chunk), text_of(HELD)
    text.token_ids += [80, 81, 82, 83]
    text.n_cached, text.stats.n_reused_tokens = 13, n_reused
    remember_cached(slot, text)
    assert (slot.cached_ids, slot.n_exact) == ([*HELD, 80, 81, 82], expected)
