"""Rotations are those of the papers, and on models with scaled positions the logits are llama.cpp's."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny
from support.models.tiny_runs import all_logits, distance

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec_runtimes.architectures.reading import read_description
from edgedec_runtimes.architectures.rope import Rope, divisor_tensor, turns
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(5).integers(0, 260, 200).astype(np.int32)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


def yarn_of_the_paper(rope: Rope) -> list[float]:
    """Return the frequencies of section 3.2 of Peng et al. 2023, pair by pair, with the ramp over whole pairs."""

    def pair(n_rotations: float) -> float:
        wave_length = rope.n_ctx_original / n_rotations
        return rope.n_rot * math.log(wave_length / (2 * math.pi)) / (2 * math.log(rope.base))

    low, high = math.floor(pair(rope.beta_fast)), math.ceil(pair(rope.beta_slow))
    found = []
    for i in range(rope.n_rot // 2):
        theta = rope.base ** (-2 * i / rope.n_rot)
        interpolated = 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)
        found.append(theta * ((1 - interpolated) + interpolated * rope.scale))
    return found


@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("n_rot", [64, 128])
@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_yarn_is_the_papers(base: float, n_rot: int, factor: float) -> None:
    """Fast pairs stay, slow ones are scaled, and rotated elements grow by 0.1 ln s + 1 (section 3.4)."""
    rope = Rope(n_rot, base, scale=1 / factor, yarn=True, n_ctx_original=4096)
    found = turns(rope)
    np.testing.assert_allclose(found.frequencies, yarn_of_the_paper(rope), rtol=1e-6)
    assert found.magnitude == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-6)
    assert found.frequencies[0] == 1.0
    assert found.frequencies[-1] == pytest.approx(base ** (2 / n_rot - 1) / factor, rel=1e-6)
    assert turns(replace(rope, log_multiplier=1.0)).magnitude == 1.0
    assert turns(replace(rope, attention_factor=1.5)).magnitude == pytest.approx(1.5 * found.magnitude)


def test_linear_scaling_and_divisors() -> None:
    """Both divide the frequencies; without them these are base^(-2i / n)."""
    plain = turns(Rope(8, 100.0)).frequencies
    np.testing.assert_allclose(plain, [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-12)
    divisors = np.array([1, 2, 4, 8], np.float32)
    np.testing.assert_allclose(turns(Rope(8, 100.0, scale=0.25), divisors).frequencies, plain / 4 / divisors)


@pytest.mark.slow
@pytest.mark.parametrize(("n_ctx", "which"), [(32, "short"), (33, "long")])
def test_longrope_chooses_its_divisors_by_the_context(tmp_path: Path, n_ctx: int, which: str) -> None:
    """Those for short contexts up to the original one; the model's fingerprint says which, as logits differ."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["phi3"])
    gguf = read_gguf(path)
    rope = read_description(gguf, "cpu").switches.rope
    assert rope.attention_factor == pytest.approx(1.19)
    assert divisor_tensor(gguf, rope, n_ctx) == f"rope_factors_{which}.weight"
    for runtime in (Cpu(), Reference()):
        prints = []
        for length in (n_ctx, 20):
            with runtime.load(path, LoadOptions(n_ctx=length)) as model:
                prints.append(model.card.fingerprint)
        assert (prints[0] == prints[1]) is (which == "short")


logits = partial(all_logits, tokens=TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", YARN),
        ("qwen2", YARN | {"rope.scaling.attn_factor": 1.25}),
        ("qwen3", YARN | {"rope.scaling.original_context_length": 300}),
        ("mistral3", YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 0.5}),
        ("mistral3", YARN | {"rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.2}),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ("llama", {"rope.scaling.factor": 4.0}),
        ("granite", {"logit_scale": 1.0, "rope.scaling.finetuned": False}),
        ("olmo2", YARN | {"attention.sliding_window": 50, "attention.sliding_window_pattern": 2}),
        ("gemma2", {"attention.sliding_window": 40, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0}),
        ("phi3", {"rope.scaling.attn_factor": 1.3, "rope.scaling.original_context_length": 256}),
        ("phi3", {"rope.scaling.attn_factor": 1.3, "rope.scaling.original_context_length": 255}),
    ],
)
def test_scaled_positions_are_llama_cpps(tmp_path: Path, architecture: str, keys: dict[str, Any]) -> None:
    """Over 200 positions the cpu and the reference runtime agree, and llama.cpp with both as far as its halves allow.

    llama.cpp reads yarn's betas of some architectures only, such as mistral3; edgedec reads them of all.
    """
    tiny = Tiny(architecture, keys=tuple(keys.items()), tied=architecture == "gemma2")
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = logits(Reference(), path)
    for runtime, bound in ((Cpu(), 3e-4), (LlamaCpp(), 3e-3)):
        assert distance(logits(runtime, path), expected) < bound, runtime.name
