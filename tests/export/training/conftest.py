"""A tiny target for training, and lessons of random numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama

from edgedec.gguf.file import read_gguf
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.target_parts import TargetParts

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"

MakeLessons = Callable[..., list[Lesson]]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model of seven layers, as few as three taps need."""
    path = tmp_path_factory.mktemp("training") / "target.gguf"
    return tiny_llama(path, seed=3, n_layer=7, n_ff=96, n_ctx_train=1024, chat_template=TEMPLATE)


@pytest.fixture
def parts(target: Path) -> TargetParts:
    """The tiny target's parts."""
    return TargetParts.of(read_gguf(target))


@pytest.fixture
def one_thread() -> None:
    """Let torch use one thread, as tensors are tiny."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def make_lessons() -> MakeLessons:
    """Returns lessons of random numbers, given the lengths of prompts and answers."""

    def make(sizes: Sequence[tuple[int, int]], seed: int = 0, n_embd: int = 4, n_vocab: int = 50) -> list[Lesson]:
        rng = np.random.default_rng(seed)

        def halves(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float16)

        return [
            Lesson(
                kind=f"kind {i % 2}",
                prompt_hash=f"{seed:08}{i:08}",
                temperature=float(np.float32(0.8 * (i % 2))),
                n_prompt=n_prompt,
                token_ids=rng.integers(0, n_vocab, n_prompt + n_answer).astype(np.int32),
                best=rng.integers(0, n_vocab, n_answer).astype(np.int32),
                taps=halves(n_prompt + n_answer - 1, 3 * n_embd),
                last=halves(n_answer, n_embd),
            )
            for i, (n_prompt, n_answer) in enumerate(sizes)
        ]

    return make
