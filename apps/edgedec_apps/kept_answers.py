"""The prompts and answers that a server kept for `edgedec learn --head`: a file for each model, as of a draft store.

A text of the file is the number of the prompt's tokens, the prompt, and the answer.
"""

from array import array
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from shutil import rmtree
from threading import Lock

from edgedec.drafters.suffix.store_file import newest, parse, serialize
from edgedec.drafters.suffix.suffix import Text
from edgedec.errors import EdgedecError, ModelFormatError
from edgedec.gguf.file import read_header_of, storage_error
from edgedec.gguf.model_info import describe
from edgedec.storage.whole_file import write_atomically
from edgedec_runtimes.trained_heads.target import target_of

_MOST_TOKENS = 500_000  # of a model's file, which has four bytes for each; the oldest go first
_MOST_PROMPT, _MOST_ANSWER = 512, 512  # tokens of one text: the prompt's last and the answer's first
_adding = Lock()


def answers_file(root: Path, model: Path) -> Path:
    """Return the file of a model's answers, below a cache folder (EdgedecError where the model can't be read)."""
    return root / "answers" / f"{target_of(read_header_of(model), root).weights_hash}.answers"


def read_answers(path: Path, model: Path) -> list[Text]:
    """Return the texts of a file, the oldest first.

    Raises:
        ModelFormatError: The file is damaged, or holds answers of a model with other tokens.
        StorageError: It can't be read.
    """
    gguf = read_header_of(model)
    try:
        data = path.read_bytes() if path.exists() else b""
        n_most = max(describe(gguf).n_vocab, _MOST_PROMPT + 1)  # as each begins with a number
        texts = parse(data, target_of(gguf).tokenizer_hash.encode(), n_most, path)
    except OSError as error:
        raise storage_error(path, error) from error
    except EdgedecError:
        texts = None
    if texts is None or not all(0 < text[0] < len(text) - 1 for text in texts):
        raise ModelFormatError(
            f"{path} is damaged, or holds answers of a model with other tokens than {model.stem}; delete it with "
            f"edgedec learn --head {model.stem} --forget"
        )
    return texts


def keep_answer(root: Path, model: Path, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Add an answer to a model's file; one to pictures is left out, and a failure is only logged."""
    if min(prompt_ids) < 0 or not answer_ids:
        return
    prompt = prompt_ids[-_MOST_PROMPT:]
    try:
        with _adding:
            path, tokens = answers_file(root, model), target_of(read_header_of(model), root).tokenizer_hash
            texts = [*read_answers(path, model), array("i", [len(prompt), *prompt, *answer_ids[:_MOST_ANSWER]])]
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, serialize(newest(texts, _MOST_TOKENS), tokens.encode()), private=True)
    except (EdgedecError, OSError) as error:
        getLogger("edgedec.server").warning("an answer could not be kept: %s", error)


def snapshot(path: Path, model: Path) -> tuple[list[Text], Path]:
    """Return the texts of a file as they were when a head began to learn of them, and the folder where it learns.

    Raises:
        EdgedecError: As read_answers, or the folder can't be written.
    """
    work = path.with_suffix(".learning")
    try:
        if path.exists() and not (work / path.name).exists():  # a server may add answers meanwhile
            work.mkdir(mode=0o700, exist_ok=True)
            write_atomically(work / path.name, path.read_bytes(), private=True)
    except OSError as error:
        raise storage_error(work, error) from error
    return read_answers(work / path.name, model), work


def forget_answers(root: Path, path: Path | None = None) -> int:
    """Delete a model's answers, or for None those of all, with what is learning of them; return how many files.

    Raises:
        StorageError: A file can't be deleted.
    """
    files = [each for each in (root / "answers").glob("*.answers") if path in (None, each)]
    for each in files:
        try:
            rmtree(each.with_suffix(".learning"), ignore_errors=True)
            each.unlink()
        except OSError as error:
            raise storage_error(each, error) from error
    return len(files)
