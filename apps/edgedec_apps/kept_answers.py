"""The prompts and answers that a server kept for `edgedec learn --head`: a file for each model, as of a draft store.

A text is the number of the prompt's tokens, the prompt, and the answer. The model's hash is in the file and its name.
"""

from array import array
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from shutil import rmtree
from threading import Lock

from edgedec.drafters.suffix.store_file import newest, parse, serialize
from edgedec.drafters.suffix.suffix import Text
from edgedec.errors import EdgedecError, ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_header_of
from edgedec.storage.whole_file import write_atomically
from edgedec_models.storage import storage_errors
from edgedec_runtimes.trained_heads.target import target_of

_MOST_TOKENS = 500_000  # of a model's file, which has four bytes for each; the oldest go first
_MOST_PROMPT, _MOST_ANSWER = 512, 512  # tokens of one text: the prompt's last and the answer's first
_adding = Lock()


def answers_file(root: Path, model: Path) -> Path:
    """Return the file of a model's answers, below a cache folder.

    Raises:
        UnsupportedModelError: It is an ONNX folder that names no weights, so that no head can be trained for them.
        EdgedecError: The model can't be read.
    """
    weights = target_of(read_header_of(model), root).weights_hash
    if not weights:
        raise UnsupportedModelError(
            f"{model}: it does not say by a hash which weights it holds, so no head learns from its answers; serve a "
            "GGUF of the model, or what edgedec export makes of one"
        )
    return root / "answers" / f"{weights}.answers"


def read_answers(path: Path) -> list[Text]:
    """Return the texts of a file, the oldest first; none where there is no file.

    Raises:
        ModelFormatError: The file is damaged, or holds answers of another model.
        StorageError: It can't be read.
    """
    with storage_errors("read", path):
        data = path.read_bytes() if path.exists() else b""
    try:
        texts = parse(data, path.stem.encode(), 1 << 31, path)
    except EdgedecError:
        texts = None
    if texts is None or not all(0 < text[0] < len(text) - 1 for text in texts):
        raise ModelFormatError(
            f"{path} is damaged, or of another model; edgedec learn --head MODEL --forget deletes it"
        )
    return texts


def keep_answer(root: Path, model: Path, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Add an answer to a model's file; one to pictures is left out, and a failure is only logged."""
    prompt = prompt_ids[-_MOST_PROMPT:]
    if min(prompt) < 0 or not answer_ids:
        return
    try:
        path = answers_file(root, model)
        with _adding, storage_errors("write", path):
            texts = [*read_answers(path), array("i", [len(prompt), *prompt, *answer_ids[:_MOST_ANSWER]])]
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, serialize(newest(texts, _MOST_TOKENS), path.stem.encode()), private=True)
    except EdgedecError as error:
        getLogger("edgedec.server").warning("an answer could not be kept: %s", error)


def snapshot(path: Path) -> tuple[list[Text], Path]:
    """Return a file's texts as they were when a head began to learn, and the folder where it does (EdgedecError)."""
    work = path.with_suffix(".learning")
    with storage_errors("copy", path):
        if path.exists() and not (work / path.name).exists():  # a server may add answers meanwhile
            work.mkdir(mode=0o700, exist_ok=True)
            write_atomically(work / path.name, path.read_bytes(), private=True)
    return read_answers(work / path.name), work


def forget_answers(root: Path, path: Path | None = None) -> int:
    """Delete a file, or all of them, with what learns of it; return how many (StorageError where one can't be)."""
    names = ("*.answers", "*.learning") if path is None else (path.name, path.with_suffix(".learning").name)
    files = [each for name in names for each in (root / "answers").glob(name)]
    for each in files:
        with storage_errors("delete", each):
            rmtree(each) if each.is_dir() else each.unlink()
    return sum(each.suffix == ".answers" for each in files)
