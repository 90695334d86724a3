"""The state of a training on the disk, from which a run that was killed goes on with the same bits."""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError
from edgedec.storage.whole_file import write_atomically
from edgedec_export.training.batches import LessonPlace
from edgedec_export.training.network import Weights


@dataclass(slots=True)
class Progressed:
    """How far a training has come.

    Attributes:
        token_ids: int32[n_vocab_draft], the tokens to draft with.
        place: Where it stands in the lessons.
        n_seen: Tokens of answers that it learned from, each time counted.
        history: Each time the drafter was measured: the tokens seen, and the tokens that a step adds.
        best: The drafter's tensors when it was best; None before it was measured.
        learner: What Student.state returned; None before the first step.
    """

    token_ids: NDArray[np.int32]
    place: LessonPlace
    n_seen: int
    history: list[tuple[int, float]]
    best: Weights | None = None
    learner: dict[str, Any] | None = None

    @property
    def best_yield(self) -> float:
        """The most tokens that a step added when the drafter was measured; 0 before."""
        return max((value for _, value in self.history), default=0.0)


def save(path: Path, key: str, state: Progressed) -> None:
    """Write a training's state; a process that is killed meanwhile leaves the one before.

    Args:
        path: The file.
        key: What the state belongs to: the target, the recipe and the drafter.
        state: The state.

    Raises:
        OSError: The file can't be written.
    """
    place = [state.place.n_pass, state.place.n_mix, state.place.n_group]
    document = {
        "key": key,
        "token_ids": torch.from_numpy(state.token_ids),
        "place": place,
        "n_seen": state.n_seen,
        "history": [list(entry) for entry in state.history],
        "best": state.best,
        "learner": state.learner,
    }
    buffer = io.BytesIO()
    torch.save(document, buffer)
    write_atomically(path, buffer.getvalue(), sync=True)


def restore(path: Path, key: str) -> Progressed | None:
    """Return the state that save() wrote, None where there is none.

    Raises:
        RequestError: It belongs to another recipe.
        ModelFormatError: The file is damaged.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError, OSError) as error:
        raise ModelFormatError(f"{path} is damaged ({error}); delete it to train from the beginning") from error
    if document["key"] != key:
        raise RequestError(f"{path} is of a training with other settings; delete it to train from the beginning")
    history = [(int(seen), float(gain)) for seen, gain in document["history"]]
    token_ids, place = document["token_ids"].numpy(), LessonPlace(*document["place"])
    return Progressed(token_ids, place, document["n_seen"], history, document["best"], document["learner"])
