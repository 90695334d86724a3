"""The default context: as long as the model was trained for, where memory allows; what keeps it at 4,096 tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny
from support.processes.command_line import run_here

import edgedec
from edgedec.decoding.prompt_length import too_long
from edgedec.errors import PromptTooLongError
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory.planner import plan_within
from edgedec.memory.setting import Cap, longest_context
from edgedec_runtimes.cpu.runtime import Cpu

TOKEN_BYTES = 2 * 2 * (16 + 16) * 2  # two layers of two heads with 16 elements, keys and values, in f16


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A model that was trained on 32,768 tokens, with 512 bytes of keys and values for each."""
    return tiny_llama(tmp_path / "long.gguf", n_ctx_train=32768)


def test_it_takes_a_quarter_of_what_the_model_leaves_free(trained: Path) -> None:
    """The tokens beyond 4,096 count, for each text that is held at the same time; it is halved until they fit."""
    for n_ctx in (32768, 16384, 8192):
        room = 4 * TOKEN_BYTES * (n_ctx - 4096)
        assert [longest_context(trained, left, 1) for left in (room, room - 1)] == [n_ctx, max(4096, n_ctx // 2)]
        assert [longest_context(trained, 3 * room + less, 3) for less in (0, -1)] == [n_ctx, max(4096, n_ctx // 2)]
    assert longest_context(trained, -1e9, 1) == 4096


def test_it_is_never_longer_than_trained(tmp_path: Path) -> None:
    """Nor shorter, where that is below 4,096 tokens; 4,096 where the file does not say it, or is no model."""
    for n_trained in (100, 4096, 5000, 8192):
        assert longest_context(tiny_llama(tmp_path / "m.gguf", n_ctx_train=n_trained), 1e12, 1) == n_trained
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF and nothing else")
    assert longest_context(tmp_path / "damaged.gguf", 1e12, 1) == 4096


def test_texts_that_depend_on_the_context_keep_4096_tokens(tmp_path: Path, trained: Path) -> None:
    """LongRoPE turns positions otherwise in long contexts; a context that slides forgets by its length."""
    phi3 = replace(ARCHITECTURES["phi3"], n_ctx_train=32768)
    assert longest_context(write_tiny(tmp_path / "phi3.gguf", phi3), 1e12, 1) == 4096
    for slides, n_ctx in ((True, 4096), (False, 32768)):
        found = plan_within(LoadPlan(trained, Cpu(), options=LoadOptions(max_rows=16), slides=slides), Cap(None))
        assert found.options.n_ctx == n_ctx


@pytest.mark.slow
def test_a_long_prompt_is_taken_without_an_option(trained: Path) -> None:
    """4,201 tokens fit; the text is that of a context that was asked for."""
    prompt = "river " * 700
    with edgedec.load(trained, runtime="cpu", draft="off") as model:
        assert model.n_ctx == 32768
        found = model.generate(prompt, max_tokens=4, temperature=0)
    with edgedec.load(trained, runtime="cpu", n_ctx=4300, draft="off") as model:
        assert model.generate(prompt, max_tokens=4, temperature=0).token_ids == found.token_ids


@pytest.mark.slow
def test_a_prompt_that_is_too_long_names_the_option_and_a_number(tmp_path: Path) -> None:
    """With that number, the prompt fits with an answer of 512 tokens, or of fewer where the model was trained so."""
    path = tiny_llama(tmp_path / "long.gguf", n_ctx_train=4096)
    with edgedec.load(path, runtime="cpu", n_ctx=256) as model, pytest.raises(PromptTooLongError) as caught:
        model.generate("river " * 50, max_tokens=1)
    assert "the prompt takes 301 tokens; the context of 256 leaves room for 255" in str(caught.value)
    assert "longer context (n_ctx 1024)" in str(caught.value)
    done = run_here("run", path, "river " * 50, "--runtime", "cpu", "--raw", "-c", "256")
    assert "(--context 1024)" in done.err
    assert run_here("run", path, "river " * 50, "--runtime", "cpu", "--raw", "-c", "1024", "-n", "4", "-q").code == 0


@pytest.mark.parametrize(
    ("n_tokens", "exact", "words"),
    [
        (300, True, "longer context (n_ctx 1000), or"),
        (1000, True, "load a model that was trained for 1536 (this one: 1000), or one that slides (slide)"),
        (1200, False, "load a model that was trained for about 1792 (this one: 1000), or"),
    ],
)
def test_no_context_is_named_that_the_model_was_not_trained_for(n_tokens: int, exact: bool, words: str) -> None:
    """The number is at most the trained one; where the prompt is longer, another model or a window would do."""
    assert words in str(too_long(n_tokens, 255, 1000, exact=exact))
