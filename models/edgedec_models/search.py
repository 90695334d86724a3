"""Searching a Hugging Face hub for repositories with GGUF models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.errors import CancelledError, OfflineError, RequestError
from edgedec.resolver import ResolveOptions
from edgedec_models.hub import endpoint, refused
from edgedec_models.offline import offline_reason

MOST_RESULTS = 100


@dataclass(frozen=True, slots=True)
class Found:
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


def search_hub(words: Sequence[str], n_most: int, options: ResolveOptions) -> list[Found]:
    """Return the repositories with GGUF models whose names have all words, the most downloaded first.

    Raises:
        RequestError: There are no words, or `n_most` is not from 1 to MOST_RESULTS.
        OfflineError: The network may not be used.
        PullError: The hub refuses, or cannot be reached.
    """
    text = " ".join(words).strip()
    if not text:
        raise RequestError("there is nothing to search for; give a word, such as the name of a family")
    if not 1 <= n_most <= MOST_RESULTS:
        raise RequestError(f"{n_most} results are asked for; it must be 1 to {MOST_RESULTS}")
    if reason := offline_reason(options):
        raise OfflineError(f"{reason}, and a search asks {endpoint()}; `edgedec list` shows the catalogue")
    from huggingface_hub import HfApi  # here, as it is a heavy library
    from huggingface_hub.errors import HfHubHTTPError

    from edgedec_models.web import TransientError, retry

    api = HfApi(endpoint=endpoint(), library_name="edgedec")
    what = f"search for {text!r:.100}"

    def attempt() -> list[Found]:
        try:
            found = api.list_models(
                search=text,
                filter="gguf",
                sort="downloads",
                limit=n_most,
                expand=["downloads", "gated", "gguf", "tags"],
            )
            return sorted(map(_found, found), key=lambda each: -(each.n_downloads or 0))
        except HfHubHTTPError as error:
            raise refused(error, error.response.status_code, what) from error
        except (CancelledError, KeyboardInterrupt):
            raise
        except Exception as error:  # as in list_repository
            raise TransientError(f"{endpoint()} cannot be reached: {error}") from error

    return retry(attempt, what, options)


def _found(info: Any) -> Found:
    """Return what is used of huggingface_hub's ModelInfo, of which a hub may leave out anything."""
    gguf = info.gguf if isinstance(info.gguf, Mapping) else {}
    n_params, architecture = gguf.get("total"), gguf.get("architecture")
    tags = [tag for tag in info.tags or () if isinstance(tag, str)]
    licence = next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return Found(
        name=f"hf:{info.id}",
        n_params=n_params if isinstance(n_params, int) and n_params > 0 else None,
        architecture=architecture if isinstance(architecture, str) else None,
        licence=licence,
        n_downloads=info.downloads if isinstance(info.downloads, int) else None,
        gated=bool(info.gated),
    )
