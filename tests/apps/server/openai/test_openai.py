"""OpenAI's own client against the server."""

from pathlib import Path
from typing import Any, Literal

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here
from support.processes.running_server import Running, messages, started

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow


def test_models(client: Any, server: Running) -> None:
    """A model of the command line is listed and answers to its name and its aliases; another is not there."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny-alias").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-x' here"):
        client.models.retrieve("gpt-x")


def test_a_chat_is_the_engines(client: Any, server: Running) -> None:
    """A chat has the text, the end and the counts that the engine has for the same options."""
    own = server.engine.chat(messages("Hello"), max_tokens=12, seed=5, temperature=0.9)
    reply = client.chat.completions.create(
        model="tiny", messages=messages("Hello"), max_completion_tokens=12, seed=5, temperature=0.9
    )
    assert reply.choices[0].message.content == own.text
    assert reply.choices[0].finish_reason == own.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (own.stats.n_prompt_tokens, 12)
    assert reply.usage.total_tokens == own.stats.n_prompt_tokens + 12
    assert (reply.timings["predicted_n"], reply.edgedec["generations"][0]["seed"]) == (12, 5)


def test_the_text_is_the_command_lines(client: Any, chat_path: Path) -> None:
    """The same prompt, settings and seed give the command line's text, byte for byte, chat and raw."""
    flags = ("-n", "16", "--seed", "9", "-q", "--runtime", "cpu", "-c", "512", "--draft", "off")
    chat = client.chat.completions.create(model="tiny", messages=messages("Hello"), max_tokens=16, seed=9)
    assert run_here("run", chat_path, "Hello", *flags).text.removesuffix("\n") == chat.choices[0].message.content
    raw = client.completions.create(model="tiny", prompt="Hello", max_tokens=16, seed=9)
    assert run_here("run", chat_path, "Hello", "--raw", *flags).text.removesuffix("\n") == raw.choices[0].text


def test_a_stream_is_the_whole(client: Any) -> None:
    """The parts of a stream add up to the answer in one piece, and end with its reason and the counts."""
    asked = {"model": "tiny", "messages": messages("Hi"), "max_tokens": 20, "seed": 1}
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    assert parts[-1].choices == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(parts[-1].usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]


def test_n_texts_are_those_of_the_seeds_after(client: Any) -> None:
    """Text k of n is what seed + k gives alone; the prompt is counted once."""
    asked = {"model": "tiny", "messages": messages("Hi"), "max_tokens": 8}
    alone = [client.chat.completions.create(**asked, seed=40 + k) for k in range(3)]
    several = client.chat.completions.create(**asked, seed=40, n=3)
    assert [c.message.content for c in several.choices] == [reply.choices[0].message.content for reply in alone]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for part in client.chat.completions.create(**asked, seed=40, n=3, stream=True):
        streamed[part.choices[0].index] += part.choices[0].delta.content or ""
    assert streamed == [choice.message.content for choice in several.choices]


def test_the_prompt_of_several_texts_is_read_once(server: Running) -> None:
    """The texts are written together: each but the first had all but the last token of its prompt from the first."""
    asked = {"model": "tiny", "messages": messages("Read me once"), "max_tokens": 8, "seed": 1, "n": 4}
    reply = server.client.post("/v1/chat/completions", json=asked).json()
    text = server.engine.samples(messages("Read me once"), 4, max_tokens=8, seed=1)
    assert [choice["message"]["content"] for choice in reply["choices"]] == [found.text for found in text]
    assert all(found.stats.n_reused_tokens == found.stats.n_prompt_tokens - 1 for found in text[1:])


def test_best_of_returns_the_most_probable_texts(client: Any, server: Running) -> None:
    """Of best_of texts, those come whose tokens are the most probable on average, the best one first."""
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "seed": 3, "temperature": 1.0}
    texts = server.engine.samples("Once", 6, max_tokens=6, seed=3, temperature=1.0)
    mean = {text.text: (text.logprob_sum or 0) / len(text.token_ids) for text in texts}
    best = sorted(mean, key=lambda text: -mean[text])
    reply = client.completions.create(n=2, best_of=6, **asked)
    assert [choice.text for choice in reply.choices] == best[:2]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert [choice.text for choice in client.completions.create(best_of=6, **asked).choices] == best[:1]


def test_logprobs(client: Any, server: Running) -> None:
    """Log-probabilities are the engine's, token by token, and their bytes are the text's."""
    own = server.engine.chat(messages("Hi"), max_tokens=6, temperature=0, logprobs=3)
    reply = client.chat.completions.create(
        model="tiny", messages=messages("Hi"), max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [output.logprob for output in own.outputs]
    assert [[top.logprob for top in e.top_logprobs] for e in entries] == [
        list(output.top_logprobs.values()) for output in own.outputs
    ]
    assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace") == own.text


def test_a_text_ends_where_the_model_is_unsure(client: Any, server: Running) -> None:
    """stop_unsure is the engine's; OpenAI's field says "stop", ours that the model was unsure, and its chance."""
    wanted = {"max_tokens": 12, "seed": 5, "temperature": 0.9}
    found = [
        (least, own)
        for least in (0.1, 0.03, 0.02, 0.01, 0.007, 0.005, 0.003)
        if (own := server.engine.generate("Hello", stop_unsure=least, **wanted)).finish_reason == "unsure"  # type: ignore[arg-type]
    ]
    least, own = max(found, key=lambda pair: len(pair[1].token_ids))
    assert own.token_ids
    asked = {"model": "tiny", "prompt": "Hello", "extra_body": {"stop_unsure": least}} | wanted
    reply = client.completions.create(**asked)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (own.text, "stop")
    told = reply.edgedec["generations"][0]
    assert (told["finish_reason"], told["chance_right"]) == ("unsure", own.stats.chance_right)
    parts = list(
        client.completions.create(
            model="tiny", prompt="Hello", stream=True, extra_body={"stop_unsure": least}, **wanted
        )
    )
    assert "".join(part.choices[0].text for part in parts) == own.text
    assert parts[-1].choices[0].finish_reason == "stop"
    chat = client.chat.completions.create(
        model="tiny", messages=messages("Hello"), extra_body={"stop_unsure": 0.99}, **wanted
    )
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("", "stop")


def test_completions_take_several_prompts(client: Any, server: Running) -> None:
    """Prompts as texts and as token ids give the same texts, echoed with the prompt before them."""
    prompts = ["Once", "upon"]
    ids = [server.engine.tokenizer.encode(prompt) for prompt in prompts]
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    by_text = client.completions.create(prompt=prompts, **asked)
    by_ids = client.completions.create(prompt=ids, **asked)
    own = [server.engine.generate(prompt, max_tokens=5, temperature=0).text for prompt in prompts]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices] == own
    echoed = client.completions.create(prompt=prompts, echo=True, **asked)
    assert [choice.text for choice in echoed.choices] == ["Once" + own[0], "upon" + own[1]]
    parts = client.completions.create(prompt="Once", stream=True, **asked)
    assert "".join(part.choices[0].text for part in parts) == own[0]


def test_completion_logprobs_and_default_length(client: Any) -> None:
    """/v1/completions has its own form of log-probabilities, and 16 tokens where no limit is given."""
    reply = client.completions.create(model="tiny", prompt="Once", temperature=0, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert reply.usage.completion_tokens == len(logprobs.tokens) == len(logprobs.token_logprobs) == 16
    assert (logprobs.text_offset[0], logprobs.text_offset[1]) == (0, len(logprobs.tokens[0]))


def test_stop_and_bias(client: Any) -> None:
    """A stop string ends the text before itself; a bias of 100 makes a token certain, and -100 rules it out."""
    forced = {"model": "tiny", "messages": messages("x"), "max_tokens": 4, "temperature": 0}
    letter_a, letter_b = str(4 + ord("a")), str(4 + ord("b"))
    plain = client.chat.completions.create(**forced, logit_bias={letter_a: 100})
    assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == ("aaaa", "length")
    stopped = client.chat.completions.create(**forced, logit_bias={letter_a: 100}, stop=["aaa", "zz"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("", "stop")
    other = client.chat.completions.create(**forced, logit_bias={letter_a: -100, letter_b: 50})
    assert other.choices[0].message.content == "bbbb"


def test_the_clients_own_parsing(client: Any) -> None:
    """What the client makes of a class and of tools is a schema, and a function, that the server takes."""
    pydantic = pytest.importorskip("pydantic")
    animal = pydantic.create_model("Animal", legs=(Literal[2, 4], ...), __config__={"extra": "forbid"})
    asked = {"model": "tiny", "messages": messages("Hi"), "seed": 3}
    parsed = client.chat.completions.parse(**asked, response_format=animal).choices[0].message.parsed
    assert isinstance(parsed, animal)
    tools = [openai.pydantic_function_tool(animal, name="count")]
    message = client.chat.completions.parse(**asked, tools=tools, tool_choice="required").choices[0].message
    assert message.tool_calls[0].function.name == "count"
    assert isinstance(message.tool_calls[0].function.parsed_arguments, animal)


def test_per_request_drafting(chat_path: Path) -> None:
    """Drafting can be switched off for a request; the text is the same, and the reply tells of both."""
    asked = {"messages": messages("abcabcabcabc"), "max_tokens": 40, "temperature": 0, "ignore_end": True}
    with started(chat_path, load_options={"draft": "suffix"}) as running:
        on = running.client.post("/v1/chat/completions", json=asked).json()
        off = running.client.post("/v1/chat/completions", json=asked | {"speculative": {"draft": "off"}}).json()
        live = running.client.post("/v1/chat/completions", json=asked | {"stream": True, "timings_per_token": True})
        drafted = running.client.get("/metrics").text
    assert on["choices"][0]["message"] == off["choices"][0]["message"]
    assert on["timings"]["draft_n"] > 0
    assert on["edgedec"]["generations"][0]["drafters"]["suffix"]["nodes"] > 0
    assert off["timings"]["draft_n"] == 0
    assert '"timings": {"predicted_n": 1,' in live.text
    assert 'edgedec_drafter_proposed_tokens_total{drafter="suffix"}' in drafted


def test_a_predicted_output(tmp_path: Path) -> None:
    """The answer is the same with a right, a wrong and no prediction; a right one is drafted, and accepted."""
    path = tiny_llama(tmp_path / "drafts.gguf", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with started(path, load_options={"draft": "suffix"}) as running:
        asked = {"messages": messages("Hi"), "max_tokens": 40, "seed": 3, "ignore_end": True}

        def answer(content: Any) -> tuple[str, int, str | None]:
            running.engine.forget()
            given = {} if content is None else {"prediction": {"type": "content", "content": content}}
            reply = running.client.post("/v1/chat/completions", json=asked | given)
            body = reply.json()
            n_accepted = body["timings"]["draft_n_accepted"]
            return body["choices"][0]["message"]["content"], n_accepted, reply.headers.get("x-edgedec-ignored")

        text, n_plain, _ = answer(None)
        parts = [{"type": "text", "text": text[:30]}, {"type": "text", "text": text[30:]}]
        for content in (text, parts):
            found, n_accepted, ignored = answer(content)
            assert (found, ignored) == (text, None)
            assert n_accepted > n_plain
        assert answer("Something else, which is not said.")[0] == text
        for wrong in ({"type": "content", "content": 1}, {"type": "image", "content": "x"}, {"type": "content"}):
            assert running.client.post("/v1/chat/completions", json=asked | {"prediction": wrong}).status_code == 400
