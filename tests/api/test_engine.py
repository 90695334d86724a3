"""The Python API, on a tiny model with both runtimes."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgedec
from edgedec.errors import (
    EdgedecError,
    MemoryCapError,
    ModelFormatError,
    ModelNotFoundError,
    PluginError,
    PromptTooLongError,
    RequestError,
    StorageError,
)
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

PROMPT = "Some text to go on from"


@pytest.mark.slow
def test_same_seed_same_text(tiny: edgedec.Engine) -> None:
    """The text is a function of prompt, settings and seed, whatever ran before; a seed that is drawn is told."""
    first = tiny.generate(PROMPT, seed=7, temperature=1.0, max_tokens=30)
    tiny.generate("Some text to", seed=1, max_tokens=5)
    drawn = tiny.generate(PROMPT, temperature=1.0, max_tokens=30)
    for expected, seed in ((first, 7), (drawn, drawn.stats.seed)):
        again = tiny.generate(PROMPT, seed=seed, temperature=1.0, max_tokens=30)
        assert (again.token_ids, again.text) == (expected.token_ids, expected.text)


@pytest.mark.slow
def test_stream_gives_what_generate_gives(tiny: edgedec.Engine) -> None:
    """The streamed pieces add up to the text, one output a token."""
    whole = tiny.generate(PROMPT, seed=3, temperature=1.0, max_tokens=25, ignore_end=True)
    stream = tiny.stream(PROMPT, seed=3, temperature=1.0, max_tokens=25, ignore_end=True)
    outputs = list(stream)
    assert "".join(output.text for output in outputs) == whole.text
    assert tuple(output.token_id for output in outputs) == whole.token_ids
    assert stream.generation.finish_reason == whole.finish_reason == "length"
    assert whole.stats.n_generated_tokens == 25


@pytest.mark.slow
def test_token_ids_are_a_prompt_too(tiny: edgedec.Engine) -> None:
    """Token ids give what the text they stand for gives."""
    prompts = (PROMPT, tiny.tokenizer.encode(PROMPT))
    assert len({tiny.generate(prompt, temperature=0, max_tokens=8).token_ids for prompt in prompts}) == 1


def test_stop_string_across_tokens_ends_the_text_before_it(tiny: edgedec.Engine) -> None:
    """A stop string that spans tokens ends the text before its first character."""
    whole = tiny.generate(PROMPT, temperature=0, max_tokens=30, ignore_end=True).text
    stop = whole[6:9]
    cut = tiny.generate(PROMPT, temperature=0, max_tokens=30, ignore_end=True, stop=(stop,))
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.slow
def test_max_tokens_and_context_end_with_length(tiny: edgedec.Engine) -> None:
    """max_tokens and a full context both end the text with "length", the latter with a reason."""
    assert len(tiny.generate(PROMPT, temperature=0, max_tokens=5, ignore_end=True).token_ids) == 5
    full = tiny.generate(PROMPT, temperature=0, ignore_end=True)
    assert full.finish_reason == "length"
    assert full.stats.n_prompt_tokens + len(full.token_ids) == tiny.n_ctx
    assert any("context of 256 tokens is full" in reason for reason in full.stats.notes)


def test_logprobs_are_the_models_own(tiny: edgedec.Engine) -> None:
    """Log-probabilities come from the untouched logits and hold the chosen token's."""
    result = tiny.generate(PROMPT, temperature=0, max_tokens=3, logprobs=4, ignore_end=True)
    for output in result.outputs:
        assert len(output.top_logprobs) == 4
        assert output.logprob == max(output.top_logprobs.values()) == output.top_logprobs[output.token_id]
    session = tiny.session(64)
    logits = session.forward(np.array(tiny.tokenizer.encode(PROMPT), np.int32), n_past=0).logits[0].astype(np.float64)
    session.close()
    expected = logits[result.token_ids[0]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert result.outputs[0].logprob == pytest.approx(expected, abs=1e-3)


def test_logit_bias_rules_a_token_out(tiny: edgedec.Engine) -> None:
    """A bias of -inf keeps the greedy token from being chosen."""
    first = tiny.generate(PROMPT, temperature=0, max_tokens=1, ignore_end=True).token_ids[0]
    other = tiny.generate(PROMPT, temperature=0, max_tokens=1, ignore_end=True, logit_bias={first: float("-inf")})
    assert other.token_ids[0] != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": 2**64}, "seed is"),
        ({"stop": "text"}, "stop is 'text'"),
        ({"stop": ("",)}, "none of them empty"),
        ({"logit_bias": {10**6: 1.0}}, "token 1000000"),
        ({"no_such_option": 1}, "has no argument 'no_such_option'"),
    ],
)
def test_bad_options_are_refused_by_name(tiny: edgedec.Engine, options: dict[str, Any], message: str) -> None:
    """An option out of range or unknown is a RequestError that names it."""
    with pytest.raises(RequestError, match=message):
        tiny.generate(PROMPT, **options)


def test_bad_prompts_are_refused(tiny: edgedec.Engine) -> None:
    """An empty, overlong, foreign or non-Unicode prompt is refused, and the next one works."""
    with pytest.raises(RequestError, match="empty"):
        tiny.generate([])
    with pytest.raises(PromptTooLongError, match="256"):
        tiny.generate("x" * 400)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        tiny.generate([1, 10**6])
    with pytest.raises(RequestError, match="surrogate"):
        tiny.generate("a\ud800b")
    assert tiny.generate(PROMPT, max_tokens=2, ignore_end=True).text is not None


def test_a_dropped_stream_frees_its_turn(tiny: edgedec.Engine) -> None:
    """Dropping or closing a stream half-way lets the next request in, on the same KV."""
    expected = tiny.generate(PROMPT, temperature=0, max_tokens=10).text
    stream = tiny.stream(PROMPT, temperature=0, max_tokens=100, ignore_end=True)
    next(stream)
    del stream
    stream = tiny.stream(PROMPT, temperature=0, max_tokens=100, ignore_end=True)
    next(stream)
    stream.close()
    assert stream.generation.finish_reason == "cancelled"
    assert tiny.generate(PROMPT, temperature=0, max_tokens=10).text == expected


@pytest.mark.slow
def test_threads_take_turns(tiny: edgedec.Engine) -> None:
    """Requests from several threads queue, and each gets its own text."""
    prompts = [f"prompt {i}" for i in range(6)]

    def text(prompt: str) -> str:
        return tiny.generate(prompt, temperature=0, max_tokens=12, ignore_end=True).text

    expected = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, prompts)) == expected


def test_cancelling_from_another_thread_keeps_the_text_so_far(tiny: edgedec.Engine) -> None:
    """A cancel token ends the generation with what there is."""
    cancel = edgedec.CancelToken()
    outputs = []
    stream = tiny.stream(PROMPT, temperature=0, ignore_end=True, cancel=cancel)
    for output in stream:
        outputs.append(output)
        if len(outputs) == 4:
            thread = threading.Thread(target=cancel.cancel)
            thread.start()
            thread.join()
    assert (stream.generation.finish_reason, len(stream.generation.token_ids)) == ("cancelled", 4)


def test_cancelling_before_the_turn(tiny: edgedec.Engine) -> None:
    """A cancelled token gives an empty generation, not an error."""
    cancel = edgedec.CancelToken()
    cancel.cancel()
    result = tiny.generate(PROMPT, cancel=cancel)
    assert (result.finish_reason, result.text) == ("cancelled", "")


def test_conversation_evaluates_only_new_tokens(tiny: edgedec.Engine) -> None:
    """A second turn reuses the whole first turn, counted in tokens."""
    messages = [{"role": "user", "content": "hello"}]
    first = tiny.chat(messages, temperature=0, max_tokens=6, ignore_end=True)
    cached = tiny.chat_ids(messages) + list(first.token_ids[:-1])
    longer = cached + tiny.tokenizer.encode(" and more", add_special=False)
    second = tiny.generate(longer, temperature=0, max_tokens=3, reuse="longest")
    assert second.stats.n_reused_tokens == len(cached)


@pytest.mark.slow
def test_exact_reuse_leaves_the_bits_of_a_cold_start(tiny_path: Path) -> None:
    """On llama.cpp only whole prefill chunks are reused by default; "longest" takes all that is shared."""
    with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=1500) as engine:
        prompt = engine.tokenizer.encode("abcdefgh" * 150)
        cold = engine.generate(prompt, temperature=0, max_tokens=8, ignore_end=True)
        warm = engine.generate(prompt, temperature=0, max_tokens=8, ignore_end=True)
        longest = engine.generate(prompt, temperature=0, max_tokens=8, ignore_end=True, reuse="longest")
    assert cold.stats.n_reused_tokens == 0
    assert warm.stats.n_reused_tokens == 1024
    assert longest.stats.n_reused_tokens == len(prompt) - 1
    assert warm.token_ids == cold.token_ids


def test_fit_messages_drops_the_oldest_turns(tiny: edgedec.Engine) -> None:
    """Overflowing chats lose their oldest turns but keep the system message; the API itself raises."""
    system = {"role": "system", "content": "s"}
    turns = [{"role": role, "content": letter * 30} for letter in "abcdef" for role in ("user", "assistant")]
    messages = [system, *turns, {"role": "user", "content": "last"}]
    with pytest.raises(PromptTooLongError):
        tiny.chat(messages)
    kept, n_dropped = tiny.fit_messages(messages, 32)
    assert (kept[0], kept[1]["role"], kept[-1]) == (system, "user", messages[-1])
    assert n_dropped == len(messages) - len(kept) > 0
    assert len(tiny.chat_ids(kept)) <= 256 - 1 - 32


@pytest.mark.slow
def test_prompt_cache_goes_on_where_it_was_saved(tiny_path: Path, tmp_path: Path) -> None:
    """A prompt cache spares a later process the prefill; a damaged or foreign file is refused."""
    file = tmp_path / "cache"
    with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=256) as engine:
        first = engine.generate(PROMPT, temperature=0, max_tokens=8, ignore_end=True)
        save_prompt_cache(engine, file)
    with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=256) as engine:
        n = load_prompt_cache(engine, file)
        again = engine.generate(PROMPT, temperature=0, max_tokens=8, ignore_end=True, reuse="longest")
        assert again.token_ids == first.token_ids
        assert again.stats.n_reused_tokens == again.stats.n_prompt_tokens - 1 < n
        data = file.read_bytes()
        for damaged in (data[:-1], data[: len(data) // 2], data[:30], data[:-9] + b"x" + data[-8:], b""):
            file.write_bytes(damaged)
            with pytest.raises(ModelFormatError):
                load_prompt_cache(engine, file)
        file.write_bytes(b"someone's notes")
        with pytest.raises(StorageError, match="no prompt cache"):
            save_prompt_cache(engine, file)
        assert file.read_bytes() == b"someone's notes"
    with edgedec.load(tiny_path, runtime="reference", n_ctx=256) as engine:
        file.write_bytes(data)
        with pytest.raises(ModelFormatError, match="another model"):
            load_prompt_cache(engine, file)


def test_async_counterparts(tiny: edgedec.Engine) -> None:
    """agenerate, astream, achat give what their blocking twins give, and leaving a stream stops it."""

    async def work() -> tuple[str, str, str]:
        generated = await tiny.agenerate(PROMPT, temperature=0, max_tokens=9, ignore_end=True)
        pieces = [o.text async for o in tiny.astream(PROMPT, temperature=0, max_tokens=9, ignore_end=True)]
        async for _ in tiny.achat_stream([{"role": "user", "content": "x"}], tools=[], temperature=0, ignore_end=True):
            break
        chatted = await tiny.achat([{"role": "user", "content": "x"}], temperature=0, max_tokens=4)
        return generated.text, "".join(pieces), chatted.text

    generated, streamed, chatted = asyncio.run(work())
    assert generated == streamed == tiny.generate(PROMPT, temperature=0, max_tokens=9, ignore_end=True).text
    assert chatted == tiny.chat([{"role": "user", "content": "x"}], temperature=0, max_tokens=4).text


@pytest.mark.parametrize("runtime", ["reference", "llamacpp", "cpu"])
def test_cancelling_the_task_stops_the_generation(tiny_path: Path, runtime: str) -> None:
    """Cancelling an agenerate task cancels the generation, so that the next request is served."""
    with edgedec.load(tiny_path, runtime=runtime, n_ctx=100_000, draft=None) as engine:

        async def work() -> None:
            task = asyncio.create_task(engine.agenerate(PROMPT, temperature=0, ignore_end=True))
            while not engine.pool.n_held and not task.done():
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(work())
        assert engine.generate(PROMPT, max_tokens=1, ignore_end=True).stats.n_generated_tokens == 1


@pytest.mark.slow
def test_a_memory_cap_refuses_before_loading(tiny_path: Path) -> None:
    """load(memory=...) raises with the table of terms when the plan is over, and loads when it is not."""
    for runtime, term in (("cpu", "KV cache"), ("llamacpp", "vocabulary")):
        with pytest.raises(MemoryCapError, match=term) as refused:
            edgedec.load(tiny_path, runtime=runtime, memory="1MB")
        assert "over by" in str(refused.value)
    with edgedec.load(tiny_path, runtime="llamacpp", memory="500MB") as engine:
        assert engine.plan.fits
        assert engine.plan.total_bytes > 0


@pytest.mark.slow
def test_unknown_names_are_told(tiny_path: Path) -> None:
    """An unknown model, runtime or drafter is an error that says what there is."""
    with pytest.raises(ModelNotFoundError):
        edgedec.load("no-such-model-at-all", offline=True)
    with pytest.raises(PluginError, match="llamacpp"):
        edgedec.load(tiny_path, runtime="no-such-runtime")
    with pytest.raises(PluginError, match="no drafter"):
        edgedec.load(tiny_path, draft="no-such-drafter")
    with pytest.raises(PluginError, match="no drafter"):  # before the model is looked for, as it may be a long download
        edgedec.load("no-such-model-at-all", draft="no-such-drafter", offline=True)


def test_importing_edgedec_imports_nothing_heavy() -> None:
    """`import edgedec` loads neither numpy nor a runtime, prints nothing and touches no signal handler."""
    code = (
        "import signal, sys; before = {s: signal.getsignal(s) for s in signal.valid_signals()}; import edgedec;"
        "assert {s: signal.getsignal(s) for s in signal.valid_signals()} == before;"
        "heavy = {'numpy', 'llama_cpp', 'onnxruntime', 'typer', 'jinja2', 'edgedec_runtimes'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
def test_loading_is_silent(tiny_path: Path) -> None:
    """Loading and generating write nothing to either stream."""
    code = (
        "import sys, edgedec\n"
        "with edgedec.load(sys.argv[1], runtime='llamacpp', n_ctx=64) as m: m.generate('x', max_tokens=2)"
    )
    result = subprocess.run([sys.executable, "-c", code, tiny_path], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_public_name_exists() -> None:
    """__all__ names what the package gives, and errors form one tree."""
    for name in edgedec.__all__:
        assert getattr(edgedec, name) is not None
    assert issubclass(PromptTooLongError, EdgedecError)
    with pytest.raises(AttributeError):
        _ = edgedec.no_such_name


@pytest.mark.slow
def test_leaving_the_with_block_inside_a_stream(tiny_path: Path) -> None:
    """Breaking out of a stream's loop and the with block frees the model; the stream is over."""
    with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=256) as engine:
        stream = engine.stream(PROMPT, temperature=0, ignore_end=True)
        for _ in stream:
            break
    assert list(stream) == []
    assert stream.generation.finish_reason == "cancelled"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT for one thread")
def test_ctrl_c_in_an_application_leaves_the_model_usable(tiny_path: Path) -> None:
    """A KeyboardInterrupt between native calls ends the request, and the next one gives a cold start's text.

    20,000 tokens take far longer than any of the delays.
    """
    code = (
        "import _thread, sys, threading, time, edgedec\n"
        "with edgedec.load(sys.argv[1], runtime='llamacpp', n_ctx=30_000) as m:\n"
        "    cold = m.generate('abc', temperature=0, max_tokens=20, ignore_end=True).text\n"
        "    for delay in (0.01, 0.02, 0.03, 0.05, 0.08):\n"
        "        timer = threading.Timer(delay, _thread.interrupt_main)\n"
        "        try:\n"
        "            timer.start()\n"
        "            m.generate('abcdef' * 200, temperature=0, ignore_end=True, max_tokens=20_000)\n"
        "        except KeyboardInterrupt:\n"
        "            print('interrupted')\n"
        "        timer.join()\n"
        "        assert m.generate('abc', temperature=0, max_tokens=20, ignore_end=True).text == cold\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tiny_path], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "interrupted" in result.stdout


def test_a_forward_that_was_refused_leaves_no_tokens_to_reuse(
    tiny: edgedec.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session still holds the text before; the next request with the refused prompt gets a cold start's text."""
    other = "Quite another prompt of about the same length"
    expected = tiny.generate(other, temperature=0, max_tokens=12).token_ids
    tiny.generate(PROMPT * 3, temperature=0, max_tokens=12)

    def refused(*args: Any, **options: Any) -> Any:
        raise MemoryCapError("no memory for a forward's results")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.pool.slots[0].session, "evaluate", refused)
        with pytest.raises(MemoryCapError):
            tiny.generate(other, temperature=0, max_tokens=12)
    assert tiny.generate(other, temperature=0, max_tokens=12).token_ids == expected
