"""A text whose model is lost in the middle: it waits until the model can be loaded, and goes on to the same end."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.decoding_loop import plugin, two_paths
from support.models.tiny_models import tiny_llama
from support.processes.hosted import hosted

from edgedec.decoding import generate
from edgedec.decoding.generate import TokenStream
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import OptionError, RuntimeLostError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions, read_options
from edgedec.pictures import Block, PictureRows
from edgedec.progress import CancelToken, Progress
from edgedec.sampling import SamplingParams
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Generation, Request
from edgedec_runtimes.child.model import ChildModel, ChildSession
from edgedec_runtimes.llamacpp.options import LlamaCppOptions

N_CTX = 128
PROMPT = (5, 9, 11, 5, 9, 11, 5, 9)
DRAFTERS = {
    "plain": None,
    "suffix": Drafting({"suffix": SuffixDrafter}, 4, always=True),
    "tree": Drafting({"tree": plugin(range(20, 60), two_paths)}, 6, always=True),
}


@dataclass
class Machine:
    """A model in a child, which can be killed, and can't be started again for some tries."""

    model: ChildModel | None = None
    n_refusals: int = 0
    cancel: CancelToken | None = None

    def prepare(self) -> None:
        """Refuse to start while refusals are left, and cancel the text at the last one where a token is given."""
        if self.n_refusals:
            self.n_refusals -= 1
            if not self.n_refusals and self.cancel is not None:
                self.cancel.cancel()
            raise RuntimeUnavailableError("the machine is away")

    def kill(self, n_refusals: int = 0) -> None:
        assert self.model is not None
        child = self.model.child
        assert child is not None
        self.n_refusals = n_refusals
        os.kill(child.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("lost") / "tiny.gguf", n_embd=32, n_ff=48, n_ctx_train=N_CTX)


@pytest.fixture
def machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The model on the reference runtime in a child; a pause is short."""
    monkeypatch.setattr(generate, "_PAUSE_S", 0.01)
    found = Machine()
    with hosted(path, LoadOptions(n_ctx=N_CTX, max_rows=8), found.prepare) as model:
        found.model = model
        yield found


def _stream(
    machine: Machine,
    params: SamplingParams,
    *,
    wait_s: float = 60.0,
    drafts: str = "plain",
    begun: tuple[int, ...] = (),
) -> TokenStream:
    assert machine.model is not None
    slot = SessionSlot(machine.model.session(N_CTX), drafting=DRAFTERS[drafts], wait_s=wait_s)
    return TokenStream(SessionPool([slot]), Request(PROMPT, params, 7, begun_ids=begun), machine.cancel)


def _result(generation: Generation) -> tuple[object, ...]:
    return generation.text, generation.token_ids, generation.finish_reason, generation.outputs, generation.logprob_sum


@pytest.mark.slow
@pytest.mark.parametrize("drafts", list(DRAFTERS))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_one_without_the_loss(
    machine: Machine, drafts: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost after ten tokens and before the first one, away for three tries: the same tokens, texts and logprobs."""
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_end=True, logprobs=2)
    undisturbed = _stream(machine, params, drafts=drafts)
    list(undisturbed)
    stream = _stream(machine, params, drafts=drafts)
    machine.kill()
    list(islice(stream, 10))
    machine.kill(n_refusals=3)
    list(stream)
    assert _result(stream.generation) == _result(undisturbed.generation)
    said = [record.getMessage() for record in caplog.records if record.name == "edgedec.decoding.generate"]
    assert sum("waiting up to 60 s until the model can be loaded again" in sentence for sentence in said) in (1, 2)
    assert said[-1] == "the model is loaded again; the text goes on"


@pytest.mark.slow
def test_a_loss_while_a_branch_is_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a tree stand, though the session that was to keep them is lost."""
    params = SamplingParams(temperature=0.9, max_tokens=30, ignore_end=True)
    undisturbed = _stream(machine, params, drafts="tree")
    list(undisturbed)
    keep, n_kept = ChildSession.keep, 0

    def keep_or_die(session: ChildSession, rows: NDArray[np.int32]) -> None:
        nonlocal n_kept
        n_kept += 1
        if n_kept == 3:
            machine.kill()
            raise RuntimeLostError("lost")
        keep(session, rows)

    monkeypatch.setattr(ChildSession, "keep", keep_or_die)
    stream = _stream(machine, params, drafts="tree")
    list(stream)
    assert n_kept > 3
    assert stream.generation.token_ids == undisturbed.generation.token_ids


@pytest.mark.slow
def test_pictures_are_read_again(machine: Machine) -> None:
    """Lost while the prompt is read and behind it: the rows of its pictures are sent to the next process again."""
    assert machine.model is not None
    rows = np.random.default_rng(0).standard_normal((12, 32)).astype(np.float32)
    picture = PictureRows(Block(12, 4, 3), rows, tuple(range(-99, -87)))
    params = SamplingParams(temperature=0.9, max_tokens=20, ignore_end=True)
    request = Request((*PROMPT, *picture.ids, *PROMPT), params, 7, pictures={picture.ids[0]: picture})
    found = list[tuple[int, ...]]()
    for n in (0, 1, 10):
        slot = SessionSlot(machine.model.session(N_CTX), drafting=DRAFTERS["suffix"], wait_s=60.0)
        stream = TokenStream(SessionPool([slot]), request)
        list(islice(stream, n))
        if n:
            machine.kill()
        list(stream)
        found.append(stream.generation.token_ids)
    assert len(found[0]) == 20
    assert len(set(found)) == 1


@pytest.mark.slow
def test_waiting_in_vain(machine: Machine) -> None:
    """When the time is over the error says what was lost and what is missing, and has the tokens so far."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_end=True)
    whole = [output.token_id for output in _stream(machine, params)]
    for wait_s, words in ((0.3, r"0.3 s were waited in vain; now: .*the machine is away"), (0.0, "was lost")):
        stream = _stream(machine, params, wait_s=wait_s)
        read = [output.token_id for output in islice(stream, 10)]
        machine.kill(n_refusals=1 << 30)
        with pytest.raises(RuntimeLostError, match=words) as caught:
            list(stream)
        machine.n_refusals = 0
        assert caught.value.token_ids == tuple(read) == tuple(whole[:10])
        resumed = _stream(machine, params, begun=caught.value.token_ids)
        assert [output.token_id for output in resumed] == whole


@pytest.mark.slow
def test_cancelling_ends_the_waiting(machine: Machine) -> None:
    """The text so far stays."""
    machine.cancel = CancelToken()
    stream = _stream(machine, SamplingParams(temperature=0.0, max_tokens=40, ignore_end=True), wait_s=float("inf"))
    read = [output.token_id for output in islice(stream, 10)]
    machine.kill(n_refusals=4)
    list(stream)
    assert (stream.generation.finish_reason, stream.generation.token_ids) == ("cancelled", tuple(read))
    assert machine.n_refusals == 0


@pytest.mark.slow
def test_what_is_reported(machine: Machine) -> None:
    """The waiting begins and ends as a phase of progress."""
    assert machine.model is not None
    seen = list[Progress]()
    slot = SessionSlot(machine.model.session(N_CTX), wait_s=60.0)
    request = Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_end=True), 7)
    stream = TokenStream(SessionPool([slot]), request, None, seen.append)
    next(stream)
    machine.kill(n_refusals=2)
    list(stream)
    waits = [progress for progress in seen if progress.phase.startswith("waiting")]
    assert [(progress.done, progress.total) for progress in waits] == [(0, None), (1, 1)]


@pytest.mark.parametrize("seconds", [-1, float("nan"), "soon", "nan", True])
def test_the_time_is_checked(seconds: object) -> None:
    """Only a number of seconds is taken; infinity is one."""
    for given in (float("inf"), "inf"):
        assert read_options(
            LlamaCppOptions, {"rpc": "a:1", "rpc_wait": given}, "the llamacpp runtime"
        ).rpc_wait == float("inf")
    with pytest.raises(OptionError, match=r"rpc_wait is .*; it must be (0 or more seconds|a number)"):
        read_options(LlamaCppOptions, {"rpc_wait": seconds}, "the llamacpp runtime")
