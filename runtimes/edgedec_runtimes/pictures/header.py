"""What the header of a projector file (mmproj) says: the kind of encoder, and the rows that it makes."""

from dataclasses import dataclass
from pathlib import Path

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_header_of
from edgedec.gguf.metadata import get_bool, get_int, get_text

_MOST = 2**31 - 1
_VISION = "clip.vision"
_DEEPSTACK = "v.deepstack."

# Where a kind's rows end: the tensor, and which of ggml's dimensions is the rows' width. gemma3 stores it transposed.
_WIDTHS = {
    "gemma3": ("mm.input_projection.weight", 0),
    "gemma4v": ("mm.input_projection.weight", 1),
    "gemma4uv": ("mm.input_projection.weight", 1),
    "idefics3": ("mm.model.fc.weight", 1),
    "lfm2": ("mm.2.weight", 1),
    "kimivl": ("mm.2.weight", 1),
    "pixtral": ("mm.2.weight", 1),
    "lightonocr": ("mm.2.weight", 1),
    "mlp": ("mm.2.weight", 1),
    "internvl": ("mm.model.mlp.3.weight", 1),
    "qwen2vl_merger": ("mm.2.bias", 0),
    "qwen2.5vl_merger": ("mm.2.bias", 0),
    "qwen3vl_merger": ("mm.2.bias", 0),
}
KINDS = tuple(_WIDTHS)
DYNAMIC = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "pixtral", "lightonocr", "kimivl", "gemma4v")
"""The kinds that make more rows of a larger picture, up to a limit of their own."""
_CAUSAL_GEMMA4 = (1536, 2560)  # the widths of E2B and E4B, whose pictures are read from left to right


@dataclass(frozen=True, slots=True)
class ProjectorHeader:
    """The facts of a projector file.

    Attributes:
        name: What the file calls itself.
        projector_type: The kind, as the file writes it ("idefics3").
        n_embd: The width of the text model that the rows are for.
        n_deepstack: How many further layers' additions a row brings.
        image_size, patch_size: In pixels.
        embedding_length, feed_forward_length, n_layers: The encoder's sizes.
        merge: How many patches beside and above each other become one row's.
        window_pattern: Which layers attend in windows, or 0.
        n_bytes: Bytes of the file's tensors.
    """

    path: Path
    name: str
    projector_type: str
    n_embd: int
    n_deepstack: int
    image_size: int
    patch_size: int
    embedding_length: int
    feed_forward_length: int
    n_layers: int
    merge: int
    window_pattern: int
    n_bytes: int

    @property
    def row_width(self) -> int:
        """The numbers of a row."""
        return self.n_embd * (1 + self.n_deepstack)

    @property
    def is_mutual(self) -> bool:
        """Whether the rows of a picture see each other."""
        if self.projector_type == "gemma4v":
            return self.n_embd not in _CAUSAL_GEMMA4
        return self.projector_type in ("gemma3", "gemma4uv")

    @property
    def description(self) -> str:
        """A phrase for a person."""
        return f"a picture encoder ({self.projector_type}) for models whose embeddings have {self.n_embd} numbers"


def is_projector(gguf: GGUF) -> bool:
    """Return whether a file holds the encoder of a multimodal model."""
    return get_text(gguf, "general.type") == "mmproj" or get_text(gguf, "general.architecture") == "clip"


def read_projector(path: Path) -> ProjectorHeader:
    """Return the facts of a projector file.

    Raises:
        ModelFormatError: The file is damaged, or lacks what such a file has.
        UnsupportedModelError: The file is something else, or of a kind that is not read.
    """
    gguf = read_header_of(path)
    if not is_projector(gguf):
        raise UnsupportedModelError(f"{path}: this is no picture encoder; give the mmproj file of the model")
    kind = get_text(gguf, "clip.vision.projector_type") or get_text(gguf, "clip.projector_type")
    if get_bool(gguf, "clip.has_vision_encoder") is False:
        raise UnsupportedModelError(
            f"{path}: this encoder takes no pictures; give the mmproj file with the vision encoder"
        )
    if kind not in _WIDTHS:
        raise UnsupportedModelError(
            f"{path}: the picture encoder is of the kind {str(kind)[:60]!r}; those that are read are {', '.join(KINDS)}"
        )
    n_deepstack = sum(name.startswith(_DEEPSTACK) and name.endswith(".fc2.weight") for name in gguf.tensors)
    merge = get_int(gguf, f"{_VISION}.spatial_merge_size", at_least=1, at_most=64)
    scale = get_int(gguf, f"{_VISION}.projector.scale_factor", at_least=1, at_most=64)
    return ProjectorHeader(
        path=path,
        name=get_text(gguf, "general.name") or path.stem,
        projector_type=kind,
        n_embd=_width(gguf, kind),
        n_deepstack=n_deepstack if kind == "qwen3vl_merger" else 0,
        image_size=_size(gguf, "image_size", 16_384),
        patch_size=_size(gguf, "patch_size", 1024),
        embedding_length=_size(gguf, "embedding_length", 1 << 16),
        feed_forward_length=_size(gguf, "feed_forward_length", 1 << 20),
        n_layers=_size(gguf, "block_count", 1024),
        merge=merge or scale or (2 if kind in DYNAMIC else 1),
        window_pattern=get_int(gguf, f"{_VISION}.n_wa_pattern", at_most=1024) or 0,
        n_bytes=sum(tensor.n_bytes for tensor in gguf.tensors.values()),
    )


def _width(gguf: GGUF, kind: str) -> int:
    name, dimension = _WIDTHS[kind]
    tensor = gguf.tensors.get(name)
    if tensor is None or dimension >= len(tensor.shape):
        raise ModelFormatError(
            f"{gguf.paths[0]}: the picture encoder {kind} has no tensor {name!r} of the form that is expected; "
            "the file is damaged or was converted wrongly: download it again"
        )
    return int(tensor.shape[dimension])


def _size(gguf: GGUF, key: str, most: int) -> int:
    value = get_int(gguf, f"{_VISION}.{key}", at_least=1, at_most=min(most, _MOST))
    if value is None:
        raise ModelFormatError(
            f"{gguf.paths[0]}: the metadata has no {f'{_VISION}.{key}'!r}, which a picture encoder needs; "
            "download the file again, or another one of the model"
        )
    return value


DYNAMIC_TOKENS = 1024
"""Most rows of a picture of the kinds that make more rows of a larger one, unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an encoder is opened.

    Attributes:
        header: The projector file's facts.
        architecture: The text model's architecture, which decides how rows are placed.
        n_threads: Threads that encode.
        max_tokens: Most rows of a picture, where the kind has such a limit; None for the file's own.
    """

    header: ProjectorHeader
    architecture: str
    n_threads: int
    max_tokens: int | None


def opening(header: ProjectorHeader, architecture: str, n_threads: int, max_tokens: int | None) -> Opening:
    """Return how a projector is opened, with the default of `max_tokens` filled in."""
    if max_tokens is None and header.projector_type in DYNAMIC:
        max_tokens = DYNAMIC_TOKENS
    return Opening(header, architecture, n_threads, max_tokens)
