"""A diffusion language model writes what a plain form of denoising writes, and all around a text holds for it."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.plain_denoising import ALL_FORMS, FORMS, MASK, TINY, Choose, Plain, write_model
from support.forwards import evaluated
from support.models.tiny_models import tiny_llama, vocabulary
from support.models.tiny_quantized import write_tiny

import edgedec
from edgedec.api.engine import Engine
from edgedec.api.options import Lossy
from edgedec.api.requests import RequestOptions
from edgedec.errors import CapabilityError, ModelFormatError, OptionError, RequestError, UnsupportedModelError
from edgedec.load_options import LoadOptions
from edgedec.model import RowGroup, Session
from edgedec.progress import CancelToken
from edgedec.sampling import SamplingParams
from edgedec_methods.diffusion.block_diffusion import Diffusion
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

N_CTX, PROMPT = 96, [1, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160]


def best(n: int) -> Choose:
    """Return what chooses the `n` greatest, the first of equal ones."""
    return lambda confidences: np.isin(np.arange(len(confidences)), np.argsort(-confidences, kind="stable")[:n])


RULES: dict[str, Choose] = {
    "schedule:1": best(1),
    "schedule:3": best(3),
    "threshold:0.05": lambda confidences: confidences >= 0.05,
}


@pytest.fixture(scope="module", params=ALL_FORMS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each form; its name says which."""
    form: str = request.param
    return write_model(tmp_path_factory.mktemp("diffusion") / f"{form}.gguf", form)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    """It, loaded with a rule that commits several positions in some passes."""
    with opened(path, "threshold:0.05") as loaded:
        yield loaded


def opened(path: Path, rule: str, n_parallel: int = 1, n_ctx: int = N_CTX) -> Engine:
    """Load a model with a rule."""
    lossy = Lossy(methods={"diffusion": {"denoise": rule}})
    return edgedec.load(path, runtime="cpu", n_ctx=n_ctx, lossy=lossy, n_parallel=n_parallel, n_threads=1)


@pytest.mark.parametrize("rule", RULES)
def test_texts_are_those_of_plain_denoising(path: Path, rule: str) -> None:
    """Greedy ones and drawn ones, in as many passes, whatever the session held before."""
    with opened(path, rule) as engine, Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as model:
        for temperature, seed, prompt in ((0.0, 0, PROMPT), (1.0, 5, PROMPT[:8]), (0.0, 0, PROMPT * 2)):
            params = SamplingParams(temperature=temperature, top_p=1.0)
            expected, n_passes = Plain(model, path.stem, RULES[rule], params, seed).text(prompt, 21)
            found = engine.generate(
                prompt, max_tokens=21, temperature=temperature, top_p=1.0, seed=seed, ignore_end=True
            )
            assert list(found.token_ids) == expected
            assert f"21 tokens in {n_passes} forwards" in found.stats.explanation[-1]


def test_blocks_end_where_lines_end(tmp_path: Path) -> None:
    """AdaBlock: texts are those of the plain form, after a cancelled one and from any of their tokens, too."""
    tokens = [f"\n{i}" if i > 300 else token for i, token in enumerate(vocabulary(320)["tokenizer.ggml.tokens"])]
    facts: dict[str, Any] = {"tokenizer.ggml.mask_token_id": MASK, "tokenizer.ggml.tokens": tokens, **FORMS["whole"]}
    path, n_moved = write_tiny(tmp_path / "m.gguf", replace(TINY, n_vocab=320), metadata=facts), 0

    def ends(places: list[int], tokens: list[int], confidences: NDArray[np.float64]) -> int | None:
        nonlocal n_moved
        breaks = [i for i, token in enumerate(tokens) if token > 300 or token == 4 + 10]
        n_moved += bool(breaks)
        return places[max(breaks, key=lambda i: confidences[i])] if breaks else None

    lossy = Lossy(methods={"diffusion": {"denoise": "lines:0", "length": 8}})
    params = SamplingParams(temperature=1.0, top_p=1.0)
    with (
        edgedec.load(path, runtime="cpu", n_ctx=N_CTX, lossy=lossy, n_threads=1) as engine,
        Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as model,
    ):
        for seed in range(6):
            sure: Choose = lambda confidences: confidences >= 0.9  # noqa: E731
            expected, n_passes = Plain(model, "whole", sure, params, seed, 8, ends).text(PROMPT, 30)
            options: RequestOptions = {"max_tokens": 30, "temperature": 1.0, "top_p": 1.0, "seed": seed}
            options["ignore_end"] = True
            whole = engine.generate(PROMPT, **options)
            assert list(whole.token_ids) == expected
            assert f"30 tokens in {n_passes} forwards" in whole.stats.explanation[-1]
            for n in (3, 11, 22):
                again = engine.generate(PROMPT, **(options | RequestOptions(resume=whole.token_ids[:n])))
                assert again.token_ids == whole.token_ids
    assert n_moved >= 6
    for form in ("blocks", "in_front"):
        with pytest.raises(OptionError, match="blocks of one size"):
            opened(write_model(tmp_path / f"{form}.gguf", form), "lines")


def test_nothing_is_drafted(path: Path) -> None:
    """Whatever the drafters; the statistics say how many tokens a forward there are, and how many would pay."""
    options: RequestOptions = {"temperature": 0.0, "ignore_end": True, "max_tokens": 20}
    with opened(path, "schedule:1") as engine:
        short = engine.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_end=True)
        found = engine.generate(PROMPT, **options)
        assert found.token_ids == engine.generate(PROMPT, **(options | RequestOptions(draft=False))).token_ids
    assert found.stats.n_drafts == 0
    assert "tokens a forward; the rule" in short.stats.explanation[-1], "nothing is timed behind a short text"
    assert re.search(r"forward, where \d+\.\d would be as fast as plain decoding", found.stats.explanation[-1])


def test_a_stop_string_ends_a_text_where_it_stands(engine: Engine) -> None:
    """The text is the beginning of the one without it, and a later text is not another one for it."""
    whole = engine.generate(PROMPT, max_tokens=24, temperature=0.0, ignore_end=True)
    stop = whole.outputs[9].text + whole.outputs[10].text
    assert stop, "the random text has characters there"
    cut = engine.generate(PROMPT, max_tokens=24, temperature=0.0, ignore_end=True, stop=(stop,))
    assert (cut.finish_reason, cut.stop_string) == ("stop", stop)
    assert cut.text == whole.text.partition(stop)[0]
    assert engine.generate(PROMPT, max_tokens=24, temperature=0.0, ignore_end=True).token_ids == whole.token_ids


def test_a_text_goes_on_as_it_would_have(engine: Engine) -> None:
    """After it was cancelled, from any of its tokens."""
    options: RequestOptions = {"max_tokens": 20, "temperature": 0.8, "seed": 3, "ignore_end": True}
    whole = engine.generate(PROMPT, **options).token_ids
    for n in (1, 6, 13):
        cancel = CancelToken()
        stream = engine.stream(PROMPT, cancel=cancel, **options)
        for _ in range(n):
            next(stream)
        cancel.cancel()
        assert "".join(output.text for output in stream).strip("\ufffd") == ""  # bytes of a character, at most
        assert engine.generate(PROMPT, **(options | RequestOptions(resume=whole[:n]))).token_ids == whole


def test_a_conversation_is_that_of_a_cold_start(path: Path, engine: Engine) -> None:
    """A prompt that goes on from an earlier text and its answer."""
    first = engine.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_end=True).token_ids
    longer = [*PROMPT, *first, 200, 201, 202]
    warm = engine.generate(longer, max_tokens=12, temperature=0.0, ignore_end=True, reuse="longest")
    assert warm.stats.n_reused_tokens > len(PROMPT)
    with opened(path, "threshold:0.05") as cold:
        assert cold.generate(longer, max_tokens=12, temperature=0.0, ignore_end=True).token_ids == warm.token_ids


def test_parallel_requests_and_samples_are_those_of_one(path: Path, engine: Engine) -> None:
    """Their forwards are joined, and texts of one prompt come one after another."""
    options: RequestOptions = {"max_tokens": 16, "temperature": 1.0, "ignore_end": True}
    alone = [engine.generate(PROMPT, **(options | RequestOptions(seed=seed))).token_ids for seed in range(3)]
    with opened(path, "threshold:0.05", n_parallel=3) as several, ThreadPoolExecutor(3) as threads:
        found = threads.map(
            lambda seed: several.generate(PROMPT, **(options | RequestOptions(seed=seed))).token_ids, range(3)
        )
        assert list(found) == alone
    assert [text.token_ids for text in engine.samples(PROMPT, 3, **(options | RequestOptions(seed=0)))] == alone


@pytest.mark.parametrize("rule", ["threshold:0.05,delayed:3", "coherent:8,window:3"])
def test_what_passes_leave_out_changes_no_text_by_what_came_before(tmp_path: Path, rule: str) -> None:
    """After a cancelled text, from any of its tokens, beside another text, behind a longer one, and with a stop."""
    path = write_model(tmp_path / "m.gguf", "whole")
    options: RequestOptions = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_end": True}
    with opened(path, rule, n_parallel=2) as engine, ThreadPoolExecutor(2) as threads:
        whole = engine.generate(PROMPT, **options)
        for n in (5, 33):
            cancel = CancelToken()
            stream = engine.stream(PROMPT, cancel=cancel, **options)
            for _ in range(n):
                next(stream)
            cancel.cancel()
            assert all(output.text.strip("\ufffd") == "" for output in stream)  # bytes of a character, at most
            again = engine.generate(PROMPT, **(options | RequestOptions(resume=whole.token_ids[:n])))
            assert again.token_ids == whole.token_ids
        assert {text.token_ids for text in threads.map(lambda _: engine.generate(PROMPT, **options), range(2))} == {
            whole.token_ids
        }
        longer = [*PROMPT, *whole.token_ids[:20], 200]
        warm = engine.generate(longer, max_tokens=12, temperature=0.0, ignore_end=True, reuse="longest")
        stop = whole.outputs[9].text + whole.outputs[10].text
        assert engine.generate(PROMPT, **(options | RequestOptions(stop=(stop,)))).text == whole.text.partition(stop)[0]
    with opened(path, rule) as cold:
        assert cold.generate(longer, max_tokens=12, temperature=0.0, ignore_end=True).token_ids == warm.token_ids


def test_a_penalty_masks_the_rest_of_a_block_again(engine: Engine) -> None:
    """Each token is drawn of its row, with all tokens before it: none comes twice, where a penalty forbids that."""
    found = engine.generate(
        PROMPT, max_tokens=16, temperature=0.0, ignore_end=True, presence_penalty=100.0, penalty_last_n=-1
    )
    assert len({*found.token_ids}) == 16
    assert not {*found.token_ids} & {*PROMPT}
    assert MASK not in found.token_ids


def test_behind_another_token_the_rest_of_a_block_is_denoised_anew(path: Path) -> None:
    """As behind a prompt that ends with that token, though the first pass had committed the whole block."""
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as model:
        session, cold = (Diffusion("schedule:32").session(model.session(N_CTX), None) for _ in range(2))
        with session.generating(len(PROMPT)):
            row = session.forward(np.array(PROMPT, np.int32), n_past=0).logits[0]
            other = int(np.argsort(row)[-2])
            found = session.forward(np.array([other], np.int32), n_past=len(PROMPT)).logits.copy()
        with cold.generating(len(PROMPT) + 1):
            expected = cold.forward(np.array([*PROMPT, other], np.int32), n_past=0).logits
        np.testing.assert_array_equal(found, expected)
        session.close()
        cold.close()


def test_log_probabilities_are_of_the_rows_that_committed(engine: Engine) -> None:
    """Each is that of the token that was drawn."""
    found = engine.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_end=True, logprobs=2)
    for output in found.outputs:
        assert output.logprob == max(output.top_logprobs.values())


def test_a_forward_may_want_no_row_and_takes_chains_alone(path: Path) -> None:
    """The row that follows is that of one forward; positions apart from slots are refused, as all special items are."""
    tokens, found = np.array(PROMPT, np.int32), []
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as model:
        for n in (0, 5):
            session = Diffusion().session(model.session(N_CTX), None)
            with session.generating(len(tokens)):
                first = session.forward(tokens[:n], n_past=0, rows=np.empty(0, np.int32)).logits if n else None
                assert first is None or first.shape == (0, model.card.n_vocab)
                found.append(session.forward(tokens[n:], n_past=n).logits.copy())
            with pytest.raises(CapabilityError, match="chains"):
                evaluated(session, 0, RowGroup(tokens, positions=tokens))
            session.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_a_fork_goes_on_as_a_session_that_has_read_the_text(path: Path) -> None:
    """From the middle of a block that was denoised, and the first session goes on as if there was none."""
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as model:

        def text(session: Session, ids: list[int], n: int) -> list[int]:
            with session.generating(len(ids)):
                for _ in range(n):
                    n_past = min(session.n_cached, len(ids) - 1)
                    row = session.forward(np.array(ids[n_past:], np.int32), n_past=n_past).logits[0]
                    ids = [*ids, int(row.argmax())]
            return ids

        first, cold = (Diffusion("threshold:0.05").session(model.session(N_CTX), None) for _ in range(2))
        begun = text(first, PROMPT, 5)
        fork = first.fork()
        assert text(fork, begun, 12) == text(cold, begun, 12)
        assert text(first, begun, 12) == text(cold, begun, 12)
        for session in (first, cold, fork):
            session.close()


def test_a_text_fills_the_context(path: Path) -> None:
    """It ends there by its length; one token less of a prompt than the context is the most."""
    with opened(path, "threshold:0.05", n_ctx=40) as engine:
        found = engine.generate(PROMPT, temperature=0.0, ignore_end=True)
        assert (len(found.token_ids), found.finish_reason) == (29, "length")
        assert len(engine.generate([1, *[70] * 38], temperature=0.0, ignore_end=True).token_ids) == 1
        with pytest.raises(RequestError):
            engine.generate([1, *[70] * 39])


def test_long_prompts_are_read_in_pieces(tmp_path: Path) -> None:
    """A prompt of more rows than a forward takes, in whole blocks: the text is that of a cold start in any case."""
    path = write_model(tmp_path / "m.gguf", "shifted", **{"diffusion.block_size": 24})
    prompt = [1, *np.random.default_rng(0).integers(4, 260, 700).tolist()]
    with opened(path, "schedule:4", n_ctx=800) as engine:
        whole = engine.generate(prompt, max_tokens=30, temperature=0.0, ignore_end=True).token_ids
        engine.generate(prompt[:300], max_tokens=5, temperature=0.0)
        again = engine.generate(prompt, max_tokens=30, temperature=0.0, ignore_end=True)
        assert (again.token_ids, again.stats.n_reused_tokens) == (whole, 300)


def test_a_text_whose_rows_all_see_each_other_is_one_forward(tmp_path: Path) -> None:
    """It may have more rows than other forwards take, up to 1024, whatever the context."""
    path, prompt = write_model(tmp_path / "whole.gguf", "whole"), PROMPT * 25
    with opened(path, "schedule:16", n_ctx=300) as engine:
        found = engine.generate(prompt, temperature=0.0, ignore_end=True)
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=300)) as model:
        expected = Plain(model, "whole", best(16), SamplingParams(temperature=0.0)).text(prompt, 25)
    assert (list(found.token_ids), found.finish_reason) == (expected[0], "length")
    with opened(path, "schedule:16", n_ctx=2000) as engine, pytest.raises(RequestError, match="1024"):
        engine.generate([1, *[70] * 1024])


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("tokenizer.ggml.mask_token_id", None, ModelFormatError),
        ("tokenizer.ggml.mask_token_id", 272, ModelFormatError),
        ("diffusion.block_size", None, ModelFormatError),
        ("diffusion.block_size", 129, ModelFormatError),
        ("diffusion.block_size", 0, ModelFormatError),
        ("diffusion.shift_logits", 1, ModelFormatError),
    ],
)
def test_a_file_that_lacks_something_is_refused_by_name(tmp_path: Path, key: str, value: object, error: type) -> None:
    """The message says which key."""
    path = write_model(tmp_path / "m.gguf", "blocks", **{key: value})
    with pytest.raises(error, match="mask token is 272" if value == 272 else key.replace(".", r"\.")):
        edgedec.load(path, runtime="cpu")


def test_other_runtimes_and_rules_are_refused(path: Path) -> None:
    """llama.cpp would write another text from left to right; a rule that is not there is named."""
    with pytest.raises(UnsupportedModelError, match="diffusion language model"):
        edgedec.load(path, runtime="llamacpp")
    for rule in ("none", "threshold:2", "schedule:x", "threshold:"):
        with pytest.raises(OptionError, match="denoise"):
            opened(path, rule)
    for options in ({"length": 0}, {"length": 33}, {"mask": 5}):
        with pytest.raises(RequestError):
            edgedec.load(path, runtime="cpu", lossy=Lossy(methods={"diffusion": options}))
    with pytest.raises(CapabilityError, match="slides"):
        edgedec.load(path, runtime="cpu", n_ctx=N_CTX, lossy=Lossy(slide=True))


def test_an_ordinary_model_is_not_denoised(tmp_path: Path) -> None:
    """It has no mask token."""
    with pytest.raises(RequestError, match="no diffusion language model"):
        opened(tiny_llama(tmp_path / "m.gguf"), "threshold")


def test_plans_count_the_rows_of_a_block(tmp_path: Path) -> None:
    """Those of a pass, those that committed, and a copy, before the load and after it."""
    path, options = write_model(tmp_path / "m.gguf", "shifted"), LoadOptions(n_threads=1, n_ctx=N_CTX, max_rows=4)
    planned = {term.name: term.n_bytes for term in Cpu().plan(path, options)}
    assert planned["logits"] == 3 * 8 * 272 * 4
    with Cpu().load(path, options) as model:
        assert not model.capabilities.keeps_prompts  # so a size of that cache is answered by a warning
        held = {term.name: term.n_bytes for term in model.memory(N_CTX, 4)}
    assert held["logits"] == planned["logits"]
