"""Archon: each layer's texts are those of its own prompts and seeds, and a damaged file of layers is refused."""

from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from support.models.tiny_models import CHATML, tiny_llama

import edgedec
from edgedec.errors import OptionError, RequestError
from edgedec_methods.archon import CRITIQUE, FUSED, Answer, Layer, layers_of, searched, through_layers
from edgedec_methods.multilingual import judged_together

DRAWN: dict[str, Any] = {"temperature": 1.5, "max_tokens": 5, "ignore_end": True}
LAYERS = """
[[layer]]
kind = "generate"
models = ["a", "b"]
n = 2
[[layer]]
kind = "critique"
models = ["b"]
[[layer]]
kind = "rank"
keep = 2
[[layer]]
kind = "fuse"
n = 2
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, edgedec.Engine]]:
    """Two tiny models."""
    folder = tmp_path_factory.mktemp("archon")
    paths = [tiny_llama(folder / f"{seed}.gguf", seed=seed, chat_template=CHATML, n_ctx_train=1024) for seed in (1, 2)]
    options: dict[str, Any] = {"runtime": "cpu", "draft": "off", "n_ctx": 1024}
    with edgedec.load(paths[0], **options) as first, edgedec.load(paths[1], **options) as second:
        yield {"a": first, "b": second}


@pytest.mark.slow
def test_the_layers_of_a_file(engines: dict[str, edgedec.Engine]) -> None:
    """The same is written by hand: greedy and drawn answers, critiques, the judge's order, and what is made of it."""
    a, b = engines.values()

    def say(engine: edgedec.Engine, content: str, seed: int) -> str:
        return engine.chat([{"role": "user", "content": content}], **DRAWN | {"seed": seed}).text

    greedy = a.chat([{"role": "user", "content": "Why?"}], **DRAWN | {"temperature": 0}).text
    answers = [greedy, say(a, "Why?", 7), say(a, "Why?", 8), say(b, "Why?", 9), say(b, "Why?", 10)]
    first = through_layers(layers_of(LAYERS)[:1], engines, "Why?", seed=7, **DRAWN)
    assert first == [Answer(text) for text in answers]
    said = [say(b, CRITIQUE.format(question="Why?", text=text), 11 + k) for k, text in enumerate(answers)]
    shown = [f"{text.strip()}\n(Critique: {words.strip()})" for text, words in zip(answers, said, strict=True)]
    scores = judged_together(a, "Why?", shown)
    order = sorted(range(5), key=lambda place: -scores[place])[:2]
    ranked = through_layers(layers_of(LAYERS)[:3], engines, "Why?", seed=7, **DRAWN)
    assert ranked == [Answer(answers[place], (said[place],)) for place in order]
    listed = "\n\n".join(f"{n}. {shown[place]}" for n, place in enumerate(order, 1))
    fused = FUSED.format(question="Why?", answers=listed)
    found = through_layers(layers_of(LAYERS), engines, "Why?", seed=7, **DRAWN)
    assert found == [Answer(say(a, fused, 16)), Answer(say(a, fused, 17))]
    with pytest.raises(RequestError, match="'c'; there are a, b"):
        through_layers(layers_of(LAYERS.replace('"b"', '"c"')), engines, "Why?", **DRAWN)
    unasked: Any = {"a": None, "b": None}
    with pytest.raises(RequestError, match="'c'; there are a, b"):  # before the first layer writes
        through_layers(layers_of(LAYERS + "[[layer]]\nkind = 'fuse'\nmodels = ['c']"), unasked, "Why?")


class Saying:
    """Writes numbered texts."""

    def __init__(self) -> None:
        self.numbers = count()

    def samples(self, prompt: Any, n: int, **options: Any) -> tuple[Any, ...]:
        """Return the next ones."""
        return tuple(SimpleNamespace(text=f"text {next(self.numbers)}") for _ in range(n))

    def chat(self, prompt: Any, **options: Any) -> Any:
        """Return the next one."""
        return self.samples(prompt, 1)[0]


def test_critiques_of_several_layers_are_all_kept() -> None:
    """In the order of their layers."""
    engines: Any = {"a": Saying()}
    found = through_layers([Layer("generate"), Layer("critique"), Layer("critique")], engines, "Why?")
    assert found == [Answer("text 0", ("text 2", "text 4")), Answer("text 1", ("text 3", "text 5"))]


class Scripted(Saying):
    """Finds texts with an even number right, and a text to pass as many tests as its number is."""

    def samples(self, prompt: Any, n: int, **options: Any) -> tuple[Any, ...]:
        """Answer, or say so."""
        content = prompt[0]["content"]
        if "An answer to" not in content:
            return (SimpleNamespace(text="It ends."),) if "Write 3 tests" in content else super().samples(prompt, n)
        number = int(content.partition("text ")[2][0])
        if "Verdict" in content:
            return (SimpleNamespace(text=f"Verdict: **{'wrong, not ' if number % 2 else ''}right**"),)
        assert "It ends." in content
        return (SimpleNamespace(text="1: Passed.\n" * number + "2: failed"),)


@pytest.mark.parametrize(
    ("layer", "numbers"),
    [
        (Layer("verify"), (0, 2)),
        (Layer("verify", ("b",)), (0, 1, 2, 3)),
        (Layer("test", n=3, keep=2), (3, 2)),
    ],
)
def test_answers_are_verified_and_tested(layer: Layer, numbers: tuple[int, ...]) -> None:
    """Right ones go on, or all where none is right; or those that pass the most tests."""
    engines: Any = {"a": Scripted(), "b": Saying()}
    found = through_layers([Layer("generate", n=3), layer], engines, "Why?")
    assert found == [Answer(f"text {number}") for number in numbers]


@pytest.mark.parametrize(("most", "n_tried", "kinds"), [(64, 10, "generate fuse rank"), (5, 5, "generate fuse")])
def test_the_search_keeps_the_best_layer_of_each_round(most: int, n_tried: int, kinds: str) -> None:
    """Until none helps: fusing is best alone, ranking behind it, and nothing behind both."""
    figures = {"generate": 3, "generate critique": 2, "generate fuse": 5, "generate fuse rank": 6}
    tried = list[str]()

    def measure(layers: Sequence[Layer]) -> float:
        tried.append(" ".join(layer.kind for layer in layers))
        return figures.get(tried[-1], 0)

    choices = [Layer("critique"), Layer("rank"), Layer("fuse")]
    layers, figure = searched(measure, Layer("generate"), choices, most=most)
    assert (" ".join(layer.kind for layer in layers), figure, len(tried)) == (kinds, figures[kinds], n_tried)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the first layer must generate"),
        ("[[layer]]\nkind = 'fuse'", "the first layer must generate"),
        ("[[layer]]\nkind = ", "no TOML"),
        ("layer = 3", r"\[\[layer\]\]"),
        ("[[layer]]\nn = 3", "each with a kind"),
        ("[[layer]]\nkind = 'generate'\nsize = 3", "a layer has size"),
        ("[[layer]]\nkind = 'invent'", "must be one of generate"),
        ("[[layer]]\nkind = 'generate'\nn = 65", "from 1 to 64"),
        ("[[layer]]\nkind = 'generate'\nn = true", "from 1 to 64"),
        ("[[layer]]\nkind = 'generate'\nmodels = 'a'", "a list of names"),
        ("[[layer]]\nkind = 'generate'\nmodels = [1]", "a list of names"),
        ("[[layer]]\nkind = 'generate'\nn = 0x1" + "0" * 5000, "no TOML"),
        ("x = " + "[" * 9000, "no TOML: maximum recursion"),
        ("x." * 5000 + "y = 1", "10005 characters; they may have 10000"),
    ],
)
def test_what_is_no_file_of_layers(text: str, words: str) -> None:
    """The error says what was found."""
    with pytest.raises((RequestError, OptionError), match=words):
        layers_of(text)
