"""Names of models on a Hugging Face hub, and the choice of a file among those of a repository.

    hf:OWNER/REPO                  the first quantization of DEFAULTS that the repository has, else its only file
    hf:OWNER/REPO:Q4_K_M           a quantization, in any case
    hf:OWNER/REPO:FILE.gguf        a file
    hf:OWNER/REPO:Q4_K_M@v1.0      the same at a branch, tag or commit

These are pure functions; hub.py uses the network.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgedec.errors import ModelNotFoundError
from edgedec_models.folders import is_device

DEFAULTS = ("Q4_K_M", "Q4_0", "Q8_0")
HEAD_CONFIG = "config.json"
LISTING = ".files.json"
"""The file in which the cache keeps the list of a repository's files."""
_MASK = "mask_embedding.pt"  # of some block heads: it replaces a row of the embedding
_BESIDE_HEAD = ("edgedec-head.json", "model.safetensors.index.json")
_SPEC = re.compile(
    r"hf:(?P<owner>\w[\w.-]*)/(?P<repo>\w[\w.-]*)(?::(?P<what>[^@:]+))?(?:@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubSpec:
    """A parsed hf: name.

    Attributes:
        owner: User or organization.
        repo: Repository.
        what: File name, quantization, or "" for the default.
        revision: Branch, tag or commit.
    """

    owner: str
    repo: str
    what: str = ""
    revision: str = "main"

    @property
    def repo_id(self) -> str:
        """OWNER/REPO, as the hub writes it."""
        return f"{self.owner}/{self.repo}"

    @property
    def names_file(self) -> bool:
        """Whether `what` is a file, and not a quantization."""
        return self.what.lower().endswith(".gguf")

    def name_of(self, file: str) -> str:
        """Return the hf: name of one file of this repository and revision."""
        return f"hf:{self.repo_id}:{file}" + ("" if self.revision == "main" else f"@{self.revision}")


def parse_hub(name: str) -> HubSpec:
    """Parse an hf: name.

    Raises:
        ModelNotFoundError: The name does not have the form described above.

    >>> parse_hub("hf:someone/tiny-GGUF:q8_0@v1")
    HubSpec(owner='someone', repo='tiny-GGUF', what='q8_0', revision='v1')
    """
    match = _SPEC.fullmatch(name)
    if match is None:
        raise ModelNotFoundError(
            f"{name!r} is not the name of a model on a hub: write hf:OWNER/REPO, then :Q4_K_M or :FILE.gguf for "
            "a quantization or a file, then @REVISION for a branch, tag or commit"
        )
    parts = match.groupdict(default="")
    return HubSpec(parts["owner"], parts["repo"], parts["what"], parts["revision"] or "main")


def is_safe(file: str) -> bool:
    """Tell whether a file name of a hub stays inside the folder that it is put into."""
    parts = file.split("/")
    return all(
        part.strip(". ") and not is_device(part) and not re.search(r'[\\:*?"<>|\x00-\x1f]', part) for part in parts
    )


def choose(files: Sequence[str], spec: HubSpec) -> tuple[str, ...]:
    """Return the files of one model among the files of a repository: one file, or all shards in order.

    Raises:
        ModelNotFoundError: No file fits, or several do; the message lists them.

    >>> choose(["a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-Q8_0.gguf"], parse_hub("hf:someone/a:q8_0"))
    ('a-Q8_0.gguf',)
    """
    models = _models_of(files)
    if not models:
        raise ModelNotFoundError(
            f"hf:{spec.repo_id}: no GGUF model in this repository (it holds {_kinds(files)}); look for one whose name "
            "ends in -GGUF"
        )
    if spec.names_file:
        models |= {file: (file,) for file in projectors(files)}
        fitting = [first for first in models if first == spec.what] or [
            first for first in models if first.rpartition("/")[2] == spec.what
        ]
    elif spec.what:
        fitting = _of_quantization(spec.what, models)
    else:
        by_default = (_of_quantization(quantization, models) for quantization in DEFAULTS)
        fitting = next((name for name in by_default if name), list(models) if len(models) == 1 else [])
    if len(fitting) == 1:
        return models[fitting[0]]
    kind = spec.what or f"a default quantization ({', '.join(DEFAULTS)})"
    problem = f"{len(fitting)} files fit {kind}" if fitting else f"nothing fits {kind}"
    listed = "\n".join(f"  {spec.name_of(first)}" for first in sorted(fitting or models))
    raise ModelNotFoundError(f"hf:{spec.repo_id}: {problem}; name one of:\n{listed}")


def projectors(files: Sequence[str]) -> list[str]:
    """Return the picture encoders (mmproj) among the files of a repository.

    >>> projectors(["a-Q8_0.gguf", "mmproj-a-f16.gguf", "mmproj.bin"])
    ['mmproj-a-f16.gguf']
    """
    return [file for file in files if file.lower().endswith(".gguf") and "mmproj" in _base(file) and is_safe(file)]


def choose_projector(files: Sequence[str], model: str) -> str | None:
    """Return the picture encoder for a model's file among the files of a repository; None where there is none.

    Those with the model's name are preferred, then those of 8 bits, then of 16: more bits change little but the size.

    >>> choose_projector(["mmproj-b-f16.gguf", "mmproj-b-Q8_0.gguf", "mmproj-c-Q8_0.gguf"], "b-Q4_0.gguf")
    'mmproj-b-Q8_0.gguf'
    """
    from edgedec_runtimes.pictures.finding import base_name, preference

    base = base_name(Path(model))

    def order(file: str) -> tuple[int, tuple[int, str]]:
        name = base_name(Path(file))
        return (0 if name == base else 1 if not name else 2), preference(file)

    return min(projectors(files), key=order, default=None)


def choose_head(files: Sequence[str], spec: HubSpec) -> tuple[str, ...]:
    """Return the files of a draft head among the files of a repository: a GGUF, or config.json and what belongs to it.

    Raises:
        ModelNotFoundError: The repository holds no such files.

    >>> choose_head(["README.md", "config.json", "model.safetensors"], parse_hub("hf:someone/head"))
    ('config.json', 'model.safetensors')
    """
    if spec.what or _models_of(files):
        return choose(files, spec)
    weights = sorted(file for file in files if file.endswith(".safetensors") and "/" not in file and is_safe(file))
    if HEAD_CONFIG not in files or not weights:
        kinds = "; PyTorch files (.bin) can run code when they are read" if _has_bin(files) else ""
        raise ModelNotFoundError(
            f"hf:{spec.repo_id}: no GGUF model in this repository (it holds {_kinds(files)}), and no draft head, which "
            f"would be a GGUF, or {HEAD_CONFIG} with safetensors{kinds}; look for one whose name ends in -GGUF"
        )
    if _MASK in files:
        raise ModelNotFoundError(
            f"hf:{spec.repo_id}: this draft head needs {_MASK}, a PyTorch file, which can run code when it is read; "
            "look for a GGUF of it"
        )
    return (HEAD_CONFIG, *(file for file in _BESIDE_HEAD if file in files), *weights)


def _kinds(files: Sequence[str]) -> str:
    return ", ".join(sorted({f".{file.rpartition('.')[2]}" for file in files if "." in file})) or "no files"


def _has_bin(files: Sequence[str]) -> bool:
    return any(file.endswith(".bin") for file in files)


def shards_of(file: str) -> tuple[str, ...]:
    """Return all files of the model that `file` belongs to, in order; `file` alone where it is not split.

    >>> shards_of("a-00002-of-00002.gguf")
    ('a-00001-of-00002.gguf', 'a-00002-of-00002.gguf')
    """
    match = _SHARD.fullmatch(file)
    if match is None:
        return (file,)
    stem, total = match["stem"], match["total"]
    extension = file.rpartition(".")[2]
    return tuple(f"{stem}-{i:05}-of-{total}.{extension}" for i in range(1, int(total) + 1))


def _models_of(files: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the complete models among the files, by first shard; projectors of vision models are left out."""
    there = set(files)
    models: dict[str, tuple[str, ...]] = {}
    for file in files:
        base = _base(file)
        if not base.endswith(".gguf") or "mmproj" in base or base.startswith("imatrix") or not is_safe(file):
            continue
        shards = shards_of(file)
        if there.issuperset(shards):
            models[shards[0]] = shards
    return models


def _base(file: str) -> str:
    return file.rpartition("/")[2].lower()


def _of_quantization(quantization: str, models: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the models with `quantization` in their name; if there are several, those whose name ends with it.

    >>> _of_quantization("q4_k", {file: (file,) for file in ["a-Q4_K.gguf", "a-Q4_K_M.gguf", "a-IQ4_K.gguf"]})
    ['a-Q4_K.gguf']
    """
    pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quantization)}(?![A-Za-z0-9_])", re.IGNORECASE)
    stems = {first: (match["stem"] if (match := _SHARD.fullmatch(first)) else first[:-5]) for first in models}
    fitting = [first for first, stem in stems.items() if pattern.search(stem)]
    if len(fitting) > 1:
        last = [first for first in fitting if stems[first].lower().endswith(quantization.lower())]
        fitting = last or fitting
    if len({stems[first].lower() for first in fitting}) == 1:  # one model, as a file and in shards
        fitting = [first for first in fitting if len(models[first]) == 1] or fitting
    return fitting
