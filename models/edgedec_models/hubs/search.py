"""Searching a Hugging Face hub for repositories with GGUF models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from edgedec.errors import OfflineError, RequestError
from edgedec.load_options import ResolveOptions
from edgedec_models.fetching.offline import offline_reason
from edgedec_models.hubs.hub import ask_hub, endpoint, require

MOST_RESULTS = 100
_FIELDS = ("downloads", "gated", "gguf", "tags")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A repository that a hub found. What the hub does not say is None.

    Attributes:
        name: The hf: name.
        n_params: Parameters of its first GGUF.
        architecture: general.architecture of its first GGUF.
        licence: The licence that the repository names.
        n_downloads: Downloads of the last month.
        gated: Whether its terms must be accepted first.
    """

    name: str
    n_params: int | None
    architecture: str | None
    licence: str | None
    n_downloads: int | None
    gated: bool


def search_hub(words: Sequence[str], n_most: int, options: ResolveOptions) -> list[FoundModel]:
    """Return the repositories with GGUF models whose names have all words, the most downloaded first.

    Raises:
        RequestError: There are no words, or `n_most` is not from 1 to MOST_RESULTS.
        OfflineError: The network may not be used.
        PullError: The hub refuses, cannot be reached, or does not answer as a hub.
    """
    text = " ".join(words).strip()
    if not text:
        raise RequestError("there is nothing to search for; give a word, such as the name of a family")
    if not 1 <= n_most <= MOST_RESULTS:
        raise RequestError(f"{n_most} results are asked for; it must be 1 to {MOST_RESULTS}")
    if reason := offline_reason(options):
        raise OfflineError(f"{reason}, and a search asks {endpoint()}; `edgedec list` shows the catalogue")
    asked: list[tuple[str, str | int]] = [
        ("search", text),
        ("filter", "gguf"),
        ("sort", "downloads"),
        ("limit", n_most),
    ]
    asked += [("expand", field) for field in _FIELDS]
    results = ask_hub(f"/api/models?{urlencode(asked)}", f"search for {text!r:.100}", options, _all_found)
    return sorted(results[:n_most], key=lambda each: -(each.n_downloads or 0))


def _all_found(answer: Any) -> list[FoundModel]:
    """Return what is used of a hub's answer (ValueError where the answer is no list of repositories)."""
    require(isinstance(answer, list), answer, "a list of repositories")
    return [_found(each) for each in answer]


def _found(info: Any) -> FoundModel:
    """Return what is used of a repository, of which a hub may leave out anything but its id."""
    require(isinstance(info, dict) and isinstance(info.get("id"), str), info, "a repository with an id")
    downloads, gguf, listed = info.get("downloads"), info.get("gguf"), info.get("tags")
    gguf = gguf if isinstance(gguf, dict) else {}
    n_params, architecture = gguf.get("total"), gguf.get("architecture")
    tags = [tag for tag in (listed if isinstance(listed, list) else ()) if isinstance(tag, str)]
    licence = next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return FoundModel(
        name=f"hf:{info['id']}",
        n_params=n_params if isinstance(n_params, int) and n_params > 0 else None,
        architecture=architecture if isinstance(architecture, str) else None,
        licence=licence,
        n_downloads=downloads if isinstance(downloads, int) else None,
        gated=bool(info.get("gated")),
    )
