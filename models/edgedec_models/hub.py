"""Models from a Hugging Face hub. huggingface_hub lists a repository; the files come through our own download.

HF_TOKEN (or the token of `hf auth login`) and HF_ENDPOINT are respected. The listing of a repository is kept in
`.files.json` beside the repository's files, so that a model that was fetched resolves without the network.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from edgedec.errors import CancelledError, ModelNotFoundError, PullError
from edgedec.resolver import ResolveOptions
from edgedec_models.hub_spec import HEAD_CONFIG, LISTING, HubSpec, choose, choose_head, shards_of
from edgedec_models.lock import locked
from edgedec_models.record import Wanted, is_recorded, read_json
from edgedec_models.storage import make_folder, write_json
from edgedec_models.verify import find_fault, write_record

DEFAULT_ENDPOINT = "https://huggingface.co"
_TOKEN_ADVICE = (
    "if the repository is private or gated, accept its terms on the hub and set HF_TOKEN to a token that may read it"
)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; for small files the hub names no SHA-256."""

    path: str
    size_bytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, or huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def hub_folder(spec: HubSpec, models: Path) -> Path:
    """Return the cache's folder for one revision of a repository; slashes of the revision are escaped."""
    return models / "hf" / spec.owner / spec.repo / quote(spec.revision, safe="")


def find_cached(spec: HubSpec, folder: Path, *, draft_head: bool = False) -> Path | None:
    """Return the model's file or first shard if all of the model is in `folder`, else None.

    Args:
        draft_head: As ResolveOptions.draft_head.
    """
    listing = _read_listing(folder)
    if listing is None:
        return None
    try:
        chosen = _choice(draft_head)([file.path for file in listing.files], spec)
    except ModelNotFoundError:
        return None  # it may have been added to the repository since
    complete = all(is_recorded(Wanted(spec.repo_id, folder / file, "")) for file in chosen)
    return folder / chosen[0] if complete else None


def fetch_hub(spec: HubSpec, folder: Path, options: ResolveOptions, *, rehash: bool = False) -> Path:
    """Fetch a model with all its shards into `folder`, and return its file or first shard.

    Where `options.draft_head` is set, the repository may hold the checkpoint of a draft head. Its config.json is
    fetched first, and is what the function returns. Where config.json is a model's, no other file is fetched.

    Args:
        rehash: Check files that are there against what the hub has now, and replace those that differ.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: The model could not be fetched.
    """
    from edgedec.trained_heads.load import is_head_path  # here, as it imports numpy

    listing = list_repository(spec, options)
    files = {file.path: file for file in listing.files}
    chosen = _choice(options.draft_head)(list(files), spec)
    make_folder(folder)
    write_json(folder / LISTING, asdict(listing))
    for path in chosen:
        name = spec.name_of(path)
        wanted = Wanted(name, folder / path, name, files[path].size_bytes, files[path].sha256)
        with locked(wanted.path, name, options):
            if not wanted.path.exists() or find_fault(wanted, options, rehash=rehash):
                write_record(wanted, _download(spec, path, listing.commit, wanted, options))
        if path == HEAD_CONFIG and not is_head_path(wanted.path):
            raise ModelNotFoundError(
                f"hf:{spec.repo_id}: no GGUF in this repository, and its {HEAD_CONFIG} is that of a model, not of a "
                "draft head; look for a model whose name ends in -GGUF, or for an EAGLE-3 head"
            )
    return folder / chosen[0]


def _choice(draft_head: bool) -> Callable[[Sequence[str], HubSpec], tuple[str, ...]]:
    return choose_head if draft_head else choose


def fetch_hub_file(spec: HubSpec, wanted: Wanted, options: ResolveOptions) -> str:
    """Fetch the file that a catalogue entry names and return its SHA-256 (hex); the caller holds the lock.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: The file could not be fetched.
    """
    if shards_of(spec.what) != (spec.what,):
        raise PullError(
            f"hf:{spec.repo_id}:{spec.what} is one shard of a split model, expected a whole file; correct the catalogue"
        )
    return _download(spec, spec.what, spec.revision, wanted, options)


def list_repository(spec: HubSpec, options: ResolveOptions) -> Listing:
    """Return the listing of a repository from the hub.

    Raises:
        ModelNotFoundError: The hub has no such repository or revision, or hides it from this token.
        PullError: The hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi  # here, because only hf: names need this heavy library
    from huggingface_hub.errors import HfHubHTTPError

    from edgedec_models.web import TransientError, retry

    api = HfApi(endpoint=endpoint(), library_name="edgedec")
    what = f"look up hf:{spec.repo_id}" + ("" if spec.revision == "main" else f"@{spec.revision}")

    def attempt() -> Listing:
        try:
            info = api.model_info(spec.repo_id, revision=spec.revision, files_metadata=True, timeout=30.0)
        except HfHubHTTPError as error:
            raise refused(error, error.response.status_code, what) from error
        except (CancelledError, KeyboardInterrupt):
            raise
        except Exception as error:  # the errors are those of the HTTP library, which depends on the version
            raise TransientError(f"{endpoint()} cannot be reached: {error}") from error
        files = tuple(
            HubFile(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None) for file in info.siblings or ()
        )
        return Listing(info.sha or spec.revision, files)

    return retry(attempt, what, options)


def refused(error: Exception, status: int, what: str) -> Exception:
    """Return the error to raise for a refusal of the hub."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    from edgedec_models.web import TransientError, refusal

    if status >= 500 or status == 429:
        return TransientError(f"{endpoint()} answers {status}")
    if isinstance(error, GatedRepoError):
        return PullError(f"{what}: the repository is gated ({status}): {_TOKEN_ADVICE}")
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{what}: the repository has no such branch, tag or commit; check what follows @")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{what}: {endpoint()} has no such repository ({status}), or hides it: {_TOKEN_ADVICE}"
        )
    return refusal(status, f"{what}: {endpoint()} answers {status}", _TOKEN_ADVICE)


def _download(spec: HubSpec, file: str, revision: str, wanted: Wanted, options: ResolveOptions) -> str:
    from huggingface_hub import get_token, hf_hub_url  # here, as in list_repository

    from edgedec_models.download import download_gguf

    url = hf_hub_url(spec.repo_id, file, revision=revision, endpoint=endpoint())
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    magic = b"GGUF" if file.lower().endswith(".gguf") else b""
    return download_gguf(url, wanted, options, headers=headers, advice=_TOKEN_ADVICE, magic=magic)


def _read_listing(folder: Path) -> Listing | None:
    value = read_json(folder / LISTING)
    files = value.get("files")
    if not isinstance(files, Sequence):
        return None
    try:
        return Listing(str(value["commit"]), tuple(HubFile(**file) for file in files))
    except (KeyError, TypeError):
        return None
