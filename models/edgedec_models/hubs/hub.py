"""Models from a Hugging Face hub: the listing of a repository, and its files through our own download.

HF_TOKEN (or the token of `hf auth login`) and HF_ENDPOINT are respected. The listing of a repository is kept in
`.files.json` beside the repository's files, so that a model that was fetched resolves without the network.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from edgedec.errors import ModelNotFoundError, PullError
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec_models.fetching.lock import locked
from edgedec_models.fetching.verify import find_fault, write_record
from edgedec_models.hubs.hub_spec import (
    HEAD_CONFIG,
    LISTING,
    HubSpec,
    choose,
    choose_head,
    choose_projector,
    projectors,
    shards_of,
)
from edgedec_models.record import WantedFile, is_recorded
from edgedec_models.storage import make_folder, write_json
from edgedec_runtimes.tile_files.record import read_json

if TYPE_CHECKING:
    import httpx

    from edgedec_models.fetching.download import Remote

T = TypeVar("T")

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
    complete = all(is_recorded(WantedFile(spec.repo_id, folder / file, "")) for file in chosen)
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
    from edgedec.head_kinds import kind_of

    listing = list_repository(spec, options)
    files = {file.path: file for file in listing.files}
    chosen = _choice(options.draft_head)(list(files), spec)
    make_folder(folder)
    write_json(folder / LISTING, asdict(listing))
    for path in (*chosen, *_with_projector(list(files), chosen)):
        target = _fetch_file(spec, listing.commit, files[path], folder, options, rehash=rehash)
        if path == HEAD_CONFIG and kind_of(target.path) is None:
            raise ModelNotFoundError(
                f"hf:{spec.repo_id}: no GGUF in this repository, and its {HEAD_CONFIG} is that of a model, not of a "
                "draft head; look for a model whose name ends in -GGUF, or for a head (EAGLE-3, DFlash, DSpark)"
            )
    return folder / chosen[0]


def _with_projector(files: Sequence[str], chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the picture encoder that is fetched with a model's files, where the repository has one."""
    is_model = chosen[0].lower().endswith(".gguf") and chosen[0] not in projectors(files)
    projector = choose_projector(files, chosen[0]) if is_model else None
    return () if projector is None else (projector,)


def _fetch_file(
    spec: HubSpec, commit: str, file: HubFile, folder: Path, options: ResolveOptions, *, rehash: bool = False
) -> WantedFile:
    """Fetch one file of a repository unless it is there."""
    name = spec.name_of(file.path)
    target = WantedFile(name, folder / file.path, name, file.size_bytes, file.sha256)
    with locked(target.path, name, options):
        if not standing(target.path).exists() or find_fault(target, options, rehash=rehash):
            write_record(target, _download(spec, file.path, commit, target, options))
    return target


def bring_projector(spec: HubSpec, model: Path, folder: Path, options: ResolveOptions) -> None:
    """Fetch the picture encoder that a repository has for a model which lies in `folder`, unless it is there.

    Raises:
        PullError, StorageError, CancelledError: It could not be fetched.
    """
    listing = _read_listing(folder)
    files = {} if listing is None else {file.path: file for file in listing.files}
    for path in _with_projector(list(files), (model.relative_to(folder).as_posix(),)):
        if listing is not None and not (folder / path).is_file():
            _fetch_file(spec, listing.commit, files[path], folder, options)


def _choice(draft_head: bool) -> Callable[[Sequence[str], HubSpec], tuple[str, ...]]:
    return choose_head if draft_head else choose


def fetch_hub_file(spec: HubSpec, file: WantedFile, options: ResolveOptions) -> str:
    """Fetch the file that a catalogue entry names and return its SHA-256 (hex); the caller holds the lock.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: The file could not be fetched.
    """
    if shards_of(spec.what) != (spec.what,):
        raise PullError(
            f"hf:{spec.repo_id}:{spec.what} is one shard of a split model, expected a whole file; correct the catalogue"
        )
    return _download(spec, spec.what, spec.revision, file, options)


def list_repository(spec: HubSpec, options: ResolveOptions) -> Listing:
    """Return the listing of a repository from the hub.

    Raises:
        ModelNotFoundError: The hub has no such repository or revision, or hides it from this token.
        PullError: The hub refuses, or cannot be reached.
    """
    what = f"look up hf:{spec.repo_id}" + ("" if spec.revision == "main" else f"@{spec.revision}")
    path = f"/api/models/{spec.repo_id}/revision/{quote(spec.revision, safe='')}?blobs=true"
    return ask_hub(path, what, options, lambda answer: _listing(answer, spec))


def ask_hub(path: str, what: str, options: ResolveOptions, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of the JSON that the hub answers with.

    Args:
        path: The address below the hub's.
        what: The work, which begins the messages of errors.
        options: As of `resolve`.
        read: Raises ValueError, with what was found, for an answer of another form.

    Raises:
        ModelNotFoundError: The hub has no such repository or revision, or hides it from this token.
        PullError: The hub refuses, can't be reached, or does not answer as a hub.
    """
    from edgedec_models.fetching.documents import MOST_JSON_BYTES, get  # here, as httpx takes long to import
    from edgedec_models.fetching.web import open_client

    with open_client() as client:
        url = endpoint() + path
        document = get(client, url, _authorization(), what, options, most_bytes=MOST_JSON_BYTES, check=_check)
    try:
        return read(document.json())
    except ValueError as error:
        raise PullError(
            f"{what}: {endpoint()} does not answer as a Hugging Face hub does: found {error}; check HF_ENDPOINT, and "
            "whether this network asks for a sign-in"
        ) from error


def _listing(answer: Any, spec: HubSpec) -> Listing:
    """Return the listing in a hub's answer (ValueError where the answer has another form)."""
    require(isinstance(answer, dict), answer, "an object")
    commit, files = answer.get("sha"), answer.get("siblings")
    require(commit is None or _is_match(r"\w[\w.-]*", commit), commit, "a commit as sha")
    require(files is None or isinstance(files, list), files, "a list as siblings")
    return Listing(commit or spec.revision, tuple(map(_file, files or ())))


def _file(entry: Any) -> HubFile:
    require(isinstance(entry, dict), entry, "an object in siblings")
    path, size, lfs = entry.get("rfilename"), entry.get("size"), entry.get("lfs")
    require(_is_match(r"[^\0\ud800-\udfff]+", path), path, "a file's name as rfilename")
    require(size is None or (type(size) is int and size >= 0), size, "a number of bytes as size")
    require(lfs is None or isinstance(lfs, dict), lfs, "an object as lfs")
    sha256 = lfs.get("sha256") if lfs else None
    require(sha256 is None or _is_match("[0-9a-f]{64}", sha256), sha256, "64 hex digits as sha256")
    return HubFile(path, size, sha256)


def _is_match(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII | re.DOTALL) is not None


def require(holds: bool, value: Any, expected: str) -> None:
    """Raise ValueError with what was found, unless something holds.

    >>> require(False, 7, "a list as siblings")
    Traceback (most recent call last):
    ValueError: 7 where a list as siblings was expected
    """
    if not holds:
        raise ValueError(f"{value!r:.80} where {expected} was expected")


def _check(response: "httpx.Response", what: str) -> None:
    """Raise the error for a refusal of the hub, by the code in its header, or else by its status."""
    from edgedec_models.fetching.web import check_status

    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    if code == "GatedRepo":
        raise PullError(f"{what}: the repository is gated ({status}): {_TOKEN_ADVICE}")
    if code == "RevisionNotFound":
        raise ModelNotFoundError(f"{what}: the repository has no such branch, tag or commit; check what follows @")
    if code == "RepoNotFound" or status == 401:
        raise ModelNotFoundError(
            f"{what}: {endpoint()} has no such repository ({status}), or hides it: {_TOKEN_ADVICE}"
        )
    check_status(response, what, _TOKEN_ADVICE)


def _authorization() -> dict[str, str]:
    """Return the header with the user's token, where there is one (PullError for one that no header can hold)."""
    from huggingface_hub import get_token  # here, as only hf: names need this heavy library

    token = get_token()
    if token and not (token.isascii() and token.isprintable()):
        raise PullError("the token of the Hugging Face hub (HF_TOKEN) has characters that no token has; correct it")
    return {"Authorization": f"Bearer {token}"} if token else {}


def chosen_files(spec: HubSpec, options: ResolveOptions) -> list[tuple[str, "Remote"]]:
    """Return the file of a model, or its shards in order, each with where it can be fetched.

    Raises:
        ModelNotFoundError, PullError: As list_repository, or no file fits.
    """
    listing = list_repository(spec, options)
    files = choose([file.path for file in listing.files], spec)
    return [(file, _remote(spec, file, listing.commit)) for file in files]


def _download(spec: HubSpec, file: str, revision: str, target: WantedFile, options: ResolveOptions) -> str:
    from edgedec_models.fetching.download import download_gguf  # here, as in ask_hub

    remote = _remote(spec, file, revision)
    return download_gguf(remote.url, target, options, headers=remote.headers, advice=remote.advice, magic=remote.magic)


def _remote(spec: HubSpec, file: str, revision: str) -> "Remote":
    from edgedec_models.fetching.download import Remote

    url = f"{endpoint()}/{spec.repo_id}/resolve/{quote(revision, safe='')}/{quote(file)}"
    magic = b"GGUF" if file.lower().endswith(".gguf") else b""
    return Remote(url, _authorization(), _TOKEN_ADVICE, magic)


def _read_listing(folder: Path) -> Listing | None:
    value = read_json(folder / LISTING)
    files = value.get("files")
    if not isinstance(files, Sequence):
        return None
    try:
        return Listing(str(value["commit"]), tuple(HubFile(**file) for file in files))
    except (KeyError, TypeError):
        return None
