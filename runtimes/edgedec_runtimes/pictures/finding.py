"""The projector file that belongs to a model: the mmproj file beside it."""

import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec.errors import RequestError, argument
from edgedec.gguf.file import read_header_of
from edgedec.gguf.metadata import get_int, get_text
from edgedec.gguf.places import standing

if TYPE_CHECKING:
    from edgedec_runtimes.pictures.header import ProjectorHeader

PATTERN = "*mmproj*.gguf"
_QUANTIZATION = re.compile(r"(?<![a-z0-9])(i?q\d[a-z0-9_]*|bf16|f16|f32|fp16|ud|mmproj|model|gguf)(?![a-z0-9])")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_PREFERENCE = ("q8_0", "f16", "bf16")


def find_projector(model: Path) -> Path | None:
    """Return the projector file that lies beside a model's file and can only be that model's; None without one.

    A file whose name, without `mmproj` and a quantization, is the model's belongs to it. One without such a name
    belongs to the only model of the folder. Of several that differ by their quantization, one of 8 bits is taken.
    """
    if not standing(model).is_file():
        return None
    try:
        projectors = [path for path in sorted(model.parent.glob(PATTERN)) if path.is_file()]
    except OSError:
        return None
    base = base_name(model)
    same_base = [path for path in projectors if base_name(path) == base]
    if not same_base:
        models = {base_name(path) for path in model.parent.glob("*.gguf") if "mmproj" not in path.name.lower()}
        same_base = [path for path in projectors if not base_name(path)] if len(models) <= 1 else []
    return min(same_base, key=preference, default=None)


def base_name(path: Path) -> str:
    """Return a file's name without what tells quantizations and projectors apart.

    >>> base_name(Path("mmproj-SmolVLM-256M-Instruct-f16.gguf")), base_name(Path("SmolVLM-256M-Instruct-Q8_0.gguf"))
    ('smolvlm-256m-instruct', 'smolvlm-256m-instruct')
    """
    stem = _SHARD.sub("", path.name.lower().removesuffix(".gguf"))
    return re.sub(r"[-._]+", "-", _QUANTIZATION.sub("", stem)).strip("-")


def preference(path: Path | str) -> tuple[int, str]:
    """Return what projector files of one model are sorted by: 8 bits first, then 16."""
    name = Path(path).name.lower()
    return next((i for i, kind in enumerate(_PREFERENCE) if kind in re.split(r"[-.]", name)), len(_PREFERENCE)), name


def fitting_projector(path: Path, model: Path) -> "ProjectorHeader":
    """Return the facts of a projector file (RequestError unless its rows have the width of the model's embeddings)."""
    from edgedec_runtimes.pictures.header import read_projector

    header = read_projector(path)
    n_embd, architecture = model_facts(model)
    if n_embd is not None and header.n_embd != n_embd:
        raise RequestError(
            f"{path.name} makes rows of {header.n_embd} numbers, and the embeddings of {model.name} ({architecture}) "
            f"have {n_embd}: give the projector of this model ({argument('projector')})"
        )
    return header


def model_facts(model: Path) -> tuple[int | None, str]:
    """Return the width of a model's embeddings, where its file says it, and its architecture."""
    gguf = read_header_of(model)
    architecture = get_text(gguf, "general.architecture") or ""
    return get_int(gguf, f"{architecture}.embedding_length", at_most=1 << 24), architecture


def content_hash(path: Path) -> bytes:
    """Return a hash of a projector file: of its header, and of the beginning of each of its tensors."""
    gguf = read_header_of(path)
    digest = sha256(f"{gguf.header_hash} {gguf.n_bytes}".encode())
    for name, tensor in gguf.tensors.items():
        digest.update(gguf.read_tensor_bytes(name, 0, min(4096, tensor.n_bytes)))
    return digest.digest()
