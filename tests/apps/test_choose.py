"""choose: the probabilities of choices equal those of evaluating each by itself, token by token."""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.models.real_models import real_model
from support.models.tiny_mamba import tiny_mamba
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import CancelledError, CapabilityError, OptionError, TemplateError
from edgedec.progress import CancelToken
from edgedec.sampling import log_probs
from edgedec_apps import choices as module
from edgedec_apps.choices import Choice, Choices, choose

PREFIXES = ["yes sir", "b", "yes", "é", "日本", "y", "a" * 70, "a" * 70 + "b", "a" * 66 + "cc", " b", "no, sir"]
LETTERS = random.Random(1)
MANY = {"".join(LETTERS.choices("abcé ", k=LETTERS.randint(1, 6))): None for _ in range(900)}
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if enable_thinking is false %}</think>{% endif %}"


@pytest.fixture(scope="module", params=["cpu", "reference"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    path = tiny_llama(tmp_path_factory.mktemp("choices") / "tiny.gguf", chat_template=THINKS)
    with edgedec.load(path, runtime=request.param, draft="off", n_ctx=256) as loaded:
        yield loaded


def each_by_itself(engine: edgedec.Engine, prompt: Any, texts: list[str]) -> list[float]:
    """Return the log-probability of each choice as an answer, from forwards of one token behind the prompt."""
    tokenizer, session, logprobs = engine.tokenizer, engine.session(), []
    ends = [i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)]
    for text in texts:
        total, n_past, tokens = 0.0, 0, list(engine.prompt_ids(prompt))
        for token in [*tokenizer.encode(text, add_special=False), None]:
            forward = session.forward(np.array(tokens, np.int32), n_past=n_past)
            n_past, tokens = n_past + len(tokens), [token] if token is not None else []
            if token is not None:
                total += float(log_probs(forward.logits[0], np.array([token]), forward.ops)[0])
        logprobs.append(total + float(np.logaddexp.reduce(log_probs(forward.logits[0], np.array(ends), forward.ops))))
    session.close()
    return logprobs


def check(engine: edgedec.Engine, prompt: Any, texts: list[str]) -> Choices:
    """Require that each choice has the bits of its own chain, and the probability of its share in plain floats."""
    weighed, expected = choose(engine, prompt, texts), each_by_itself(engine, prompt, texts)
    assert [(choice.text, choice.logprob) for choice in weighed.choices] == list(zip(texts, expected, strict=True))
    whole = math.fsum(math.exp(each - max(expected)) for each in expected)
    shares = [math.exp(each - max(expected)) / whole for each in expected]
    assert [choice.probability for choice in weighed.choices] == pytest.approx(shares, rel=1e-12, abs=0)
    assert math.fsum(choice.probability for choice in weighed.choices) == pytest.approx(1, abs=1e-12)
    assert weighed.mass == pytest.approx(sum(map(math.exp, expected)), rel=1e-12)
    return weighed


@pytest.mark.slow
@pytest.mark.parametrize("texts", [["yes", "no"], ["é"], ["a", "ab", "abc", "b"], PREFIXES, [*MANY][:500]])
def test_probabilities_are_those_of_each_choice_by_itself(engine: edgedec.Engine, texts: list[str]) -> None:
    """Prefixes of others, bytes of characters, long common beginnings, 500; each node is evaluated once, if few."""
    weighed = check(engine, "x?", texts)
    nodes = {choice.token_ids[:n] for choice in weighed.choices for n in range(1, len(choice.token_ids) + 1)}
    assert weighed.n_rows == len(nodes) if weighed.n_forwards == 1 else len(nodes) > 32 * weighed.n_forwards


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"trees": False}, {"max_rows": 4}, {"trees": False, "rollback": False}])
def test_chunks_chains_and_prompts_read_anew_have_the_same_figures(
    engine: edgedec.Engine, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    """A runtime without trees, one of few rows, and one whose state can't go back; and where memory is planned."""
    tree = choose(engine, "x?", PREFIXES)
    monkeypatch.setattr(engine.model, "capabilities", replace(engine.model.capabilities, **limits))
    parts = choose(engine, "x?", PREFIXES)
    assert parts.choices == tree.choices
    assert parts.n_forwards > tree.n_forwards
    monkeypatch.setattr(engine.pool.slots[0], "text_rows", 1)
    assert choose(engine, "x?", PREFIXES).choices == tree.choices


@pytest.mark.slow
def test_a_recurrent_model_that_can_not_go_back(tmp_path: Path) -> None:
    """The prompt is read anew for each choice; a choice may have more tokens than a forward has rows of logits."""
    pytest.importorskip("llama_cpp")
    texts = ["a", "ab", "abcabc" * 6, "b"]
    with edgedec.load(tiny_mamba(tmp_path / "mamba.gguf"), runtime="llamacpp", draft="off", n_ctx=128) as mamba:
        weighed = [choice.logprob for choice in choose(mamba, "x?", texts).choices]
        assert weighed == pytest.approx(each_by_itself(mamba, "x?", texts), abs=2e-3)


@pytest.mark.slow
def test_a_model_that_answers() -> None:
    """On a chat with a model of many tokens in its vocabulary, whose prompt is not read again; its text is unharmed."""
    with edgedec.load(real_model("smollm2-135m.gguf"), runtime="cpu", draft="off", offline=True) as model:
        chat = [{"role": "user", "content": "Is the sea blue? Answer yes or no."}]
        cold = model.chat(chat, temperature=0, max_tokens=6, reuse="exact")
        texts = ["Yes", "No", "Yes, it is.", "yes", "The sea is blue.", cold.text, "naïve 日本"]
        assert choose(model, chat, texts).choices == (weighed := check(model, model.chat_ids(chat), texts)).choices
        assert weighed.n_reused_tokens == weighed.n_prompt_tokens - 1
        assert model.chat(chat, temperature=0, max_tokens=6, reuse="exact").token_ids == cold.token_ids


@pytest.mark.slow
def test_thoughts_are_left_out(engine: edgedec.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the template's variable; a model that begins to think in any case is refused."""
    chat = [{"role": "user", "content": "b"}]
    assert choose(engine, chat, ["a", "b"]).choices == check(engine, "b<think></think>", ["a", "b"]).choices
    monkeypatch.setattr(module, "thinking_variables", Mock(side_effect=TemplateError("it always thinks")))
    with pytest.raises(CapabilityError, match="the model thinks before each answer"):
        choose(engine, chat, ["a", "b"])


@pytest.mark.slow
def test_what_can_not_be_chosen_among_is_refused(engine: edgedec.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No texts, empty or equal ones, tokens of another text, more tokens than there is room for; a cancelled work."""
    room = 256 - len(engine.prompt_ids("x?"))
    check(engine, "x?", ["a" * room, "b"])
    for texts, says in (("ab", "a sequence"), (["a", "a"], "twice"), (["a" * room + "a"], f"room for {room} tokens")):
        with pytest.raises(OptionError, match=says):
            choose(engine, "x?", texts)
    cancel = CancelToken()
    with pytest.raises(CancelledError):  # between the prompt and the choices
        choose(engine, "x?", ["a", "b"], cancel=cancel, on_progress=lambda _: cancel.cancel())
    with pytest.raises(CancelledError):
        choose(engine, "x?", ["a", "b"], cancel=cancel)
    ids, encode = engine.prompt_ids("x?"), engine.tokenizer.encode
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda _, text, **x: encode(f" {text.strip().lower()}", **x))
    for texts, says in (([" a", "a"], "the same tokens as ' a'"), (["A", "b"], "does not keep this text")):
        with pytest.raises(OptionError, match=says):
            choose(engine, ids, texts)


def test_equal_choices_keep_their_order_and_draws_follow_the_law() -> None:
    """Of equals the first is the most probable; at a temperature each comes as often as p^(1 / temperature) says."""
    logprobs = {"c": -3.0, "b": -1.0, "a": -1.0}
    weighed = Choices(tuple(Choice(text, (), logprob, 0.0) for text, logprob in logprobs.items()), 1, 0, 1, 3, 0.0)
    assert [*(choice.text for choice in weighed.ranked), weighed.drawn(0, 7).text] == ["b", "a", "c", "b"]
    counts = Counter(weighed.drawn(2.0, seed).text for seed in range(2000))
    for text, p in (("a", 0.4223), ("b", 0.4223), ("c", 0.1554)):  # e^-0.5 and e^-1.5, of their sum
        assert abs(counts[text] - 2000 * p) < 4 * math.sqrt(2000 * p * (1 - p))
