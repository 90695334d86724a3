"""Devices on which a forward like the one before it is replayed: `auto` is never slower there, and still gains.

The figures of the H100 were measured: qwen2.5-coder-1.5b Q4_K_M, llama.cpp's CUDA back end, all layers on the GPU. The
other devices are rooflines. Texts are those of a real model; what a forward takes is what a device's figures say.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.simulation import Clock, context, decode, policy_of
from support.models.real_models import real_model

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec.model_card import Capabilities
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.drafter_factories import drafter_factories
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.sessions.cost_probe import cost_curve
from edgedec_apps.bench.prompts import prepare, read_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))

from rooflines import DEVICES, modelled

pytestmark = [pytest.mark.slow, pytest.mark.model]

# Milliseconds of a forward: a plain step after a plain step, a single row after others, and other numbers of rows.
H100_STREAK, H100_ONE = 2.0, 3.0
H100 = {2: 5.3, 3: 2.6, 4: 5.6, 6: 5.6, 8: 6.7, 12: 7.0, 16: 8.3, 64: 12.0}
N_BYTES, N_PARAMS = 1_117_000_000, 1_777_000_000
WITH_GRAPHS = [name for name, device in DEVICES.items() if device.launch_s]
Text: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Texts: TypeAlias = dict[str, Text]
N_TOKENS, N_VOCAB = 96, 49_152


@dataclass(slots=True)
class Replayed:
    """The seconds of forwards, where a plain step after a plain step is replayed.

    Attributes:
        streak_s: Seconds of such a step.
        launched: Seconds of any other forward by its rows.
        before: Rows of the latest forward.
    """

    streak_s: float
    launched: Callable[[int], float]
    before: int = 0

    def __call__(self, n_rows: int) -> float:
        """Return the seconds of the next forward."""
        before, self.before = self.before, n_rows
        return self.streak_s if n_rows == before == 1 else self.launched(n_rows)


def forwards(device: str) -> Replayed:
    """Return the forwards of a device."""
    if device == "h100":
        rows, seconds = [1, *H100], [H100_ONE, *H100.values()]
        return Replayed(H100_STREAK / 1e3, lambda n: float(np.interp(n, rows, seconds)) / 1e3)
    seconds_of, launch_s = modelled(DEVICES[device], N_BYTES, N_PARAMS), DEVICES[device].launch_s
    return Replayed(seconds_of(1), lambda n: seconds_of(n) + (launch_s if n == 1 else 0.0))


def probed(clock: Clock, seconds: Replayed) -> CostCurve:
    """Return the curve that is measured when a model is loaded."""

    def forward(tokens: NDArray[np.int32], **options: object) -> None:
        clock.now += seconds(len(tokens))

    card, bare = (
        SimpleNamespace(n_vocab=50, fingerprint="f", runtime="fake"),
        SimpleNamespace(encode=lambda *_, **__: [1]),
    )
    model = SimpleNamespace(card=card, capabilities=Capabilities(max_rows=16), tokenizer=bare)
    return cost_curve(
        cast(Session, SimpleNamespace(model=model, room=lambda n: 512 - n, forward=forward)), LoadOptions()
    )


@pytest.fixture
def measuring(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The policy's clock, also for the measurement at load."""
    monkeypatch.setattr("edgedec.sessions.cost_probe.perf_counter", clock)
    monkeypatch.setattr("edgedec.sessions.cost_probe.monotonic", clock)
    return clock


@pytest.fixture(scope="module")
def texts() -> Texts:
    """Return a prompt of each kind and what the small model writes after it, by the names of the prompts."""
    found = {}
    with edgedec.load(real_model("smollm2-135m.gguf"), n_ctx=2048) as model:
        for request in prepare(model, read_prompts()[::4], N_TOKENS):
            result = model.generate(request.token_ids, max_tokens=N_TOKENS, temperature=0, ignore_end=True)
            found[request.id] = request.token_ids, tuple(result.token_ids)
    return found


def speedup(device: str, written: Text, clock: Clock, *, draft: str = "auto") -> float:
    """Return how many times as fast as plain decoding a text is written on a device, the probe at load not counted."""
    seconds = forwards(device)
    curve, (prompt, text) = probed(clock, seconds), written
    factories, pinned = drafter_factories(draft, with_model=False)
    opened = context()
    members = []
    for drafter, factory in factories.items():
        made = factory(opened)
        made.begin(list(prompt))
        members.append(ActiveDrafter(drafter, made, DrafterRecord()))
    policy = policy_of(members, curve, always=pinned, n_vocab=N_VOCAB)
    seconds.before = 1  # the prompt's last token is the first step's; plain decoding begins there as well
    run = decode(policy, list(text), curve, seconds, clock)
    assert run.token_ids == list(text)
    return len(text) * seconds.streak_s / run.seconds


@pytest.mark.parametrize("device", ["h100", *WITH_GRAPHS])
def test_no_text_is_slower_than_plain_decoding(device: str, texts: Texts, measuring: Clock) -> None:
    """At 0.98 of plain decoding or above for every prompt, and well above where texts copy."""
    found = {name: speedup(device, written, measuring) for name, written in texts.items()}
    assert min(found.values()) >= 0.98, found
    assert max(found.values()) >= 1.3, found


def test_a_curve_over_rows_alone_would_be_slower(texts: Texts, measuring: Clock) -> None:
    """Drafts that are verified whatever they cost lose on most texts there: what is tested above can fail."""
    found = [speedup("h100", written, measuring, draft="suffix") for written in texts.values()]
    assert min(found) < 0.9
