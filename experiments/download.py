"""TensorFlow Datasets as downloader, cache and checksum of CIFAR-10, without TensorFlow.

TFDS cannot *prepare* or even unpack without TensorFlow; its download manager and its table of checksums need none. The
archive is unpacked here to where TFDS itself would unpack it, so either finds what the other left.
"""

import base64
import dataclasses
import gzip
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

from experiments.cifar_files import FOLDER, TEST_FILES, TRAIN_FILES, URL
from experiments.errors import DataError, DataUnavailableError

PROBE_SECONDS = 4.0


@dataclasses.dataclass(frozen=True)
class Archive:
    """An archive of the binary files, as TFDS's table of downloads knows it.

    Attributes:
      url: where it comes from.
      info: TFDS's `UrlInfo`: the size in bytes and the SHA-256 (`checksum`).
    """

    url: str
    info: Any

    @property
    def cached_name(self) -> str:
        """The pattern of its name in TFDS's cache, which ends in the SHA-256: another content is never taken for it."""
        digest = base64.urlsafe_b64encode(bytes.fromhex(self.info.checksum)).decode().rstrip("=")
        return f"*{digest}.tar.gz"


def cifar10_archive() -> Archive:
    """What TFDS knows about CIFAR-10's archive.

    Raises:
      DataUnavailableError: TFDS is not installed, or knows another address.
    """
    infos = _tfds().builder("cifar10").url_infos
    if URL not in infos:
        raise DataUnavailableError(f"this version of tensorflow-datasets does not know {URL}")
    return Archive(URL, infos[URL])


def cache_directory() -> Path:
    """TFDS's data directory: `~/tensorflow_datasets`, or what the variable TFDS_DATA_DIR says.

    Raises:
      DataUnavailableError: TFDS is not installed, or the directory is not on this machine.
    """
    directory = os.path.expanduser(os.fspath(_tfds().core.constants.DATA_DIR))
    if "://" in directory:
        raise DataUnavailableError(
            f"the cache must be a local folder, TFDS_DATA_DIR is {directory}: set it to a local one"
        )
    return Path(directory)


def find_extracted(cache: Path, archive: Archive) -> Path | None:
    """The folder of the binary files below a TFDS data directory, or None."""
    found = sorted((cache / "downloads" / "extracted").glob(f"TAR_GZ.{archive.cached_name}/{FOLDER}"))
    return found[0] if found else None


def fetch(cache: Path, archive: Archive) -> Path:
    """Downloads an archive unless it is cached, and unpacks it into the cache.

    Args:
      cache: a TFDS data directory.
      archive: what to bring, usually `cifar10_archive()`.

    Returns:
      The folder of the binary files. The archive's SHA-256 is checked when it comes; the files are checked by who reads them.

    Raises:
      DataUnavailableError: no network, a server that does not hand out the archive, or a cache that cannot be written.
      DataError: the cached archive is damaged.
    """
    downloads = cache / "downloads"
    try:
        path = _bring(downloads, archive)
    except DataError:
        raise
    except Exception as error:  # OSError, requests' errors, and TFDS's own, which share no base (checksum, HTTP status)
        text = " ".join(str(error).split())[:300]
        raise DataUnavailableError(f"{archive.url} could not be brought into {downloads}: {text}") from None
    try:
        return _unpack(path, downloads / "extracted" / f"TAR_GZ.{path.name}")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: must be the archive {archive.url}: {error}. Delete it and run again.") from None
    except OSError as error:
        raise DataUnavailableError(f"{path} could not be unpacked beside it: {error}") from None


def _bring(downloads: Path, archive: Archive) -> Path:
    """The archive's place in TFDS's cache, downloaded if it was not there; a cached one is used without a network."""
    for folder in (downloads / "cifar10", downloads):  # TFDS's place, and that of its older versions
        for cached in sorted(folder.glob(archive.cached_name)):
            return cached
    refusal = probe(archive.url)
    if refusal:
        raise DataUnavailableError(f"CIFAR-10 is not in {downloads.parent} and {archive.url} gave: {refusal}")
    print(f"downloading CIFAR-10 ({archive.info.size / 2**20:.0f} MiB) from {archive.url}", file=sys.stderr)
    manager = _tfds().download.DownloadManager(
        download_dir=downloads,
        dataset_name="cifar10",
        url_infos={archive.url: archive.info},
        force_checksums_validation=True,
    )
    return Path(os.fspath(manager.download(archive.url)))


def probe(url: str, seconds: float = PROBE_SECONDS) -> str:
    """Asks whether a server hands out a file, within a few seconds; TFDS itself would retry for minutes.

    The request goes through the proxies of the environment as the download would. It runs in a thread of its own, as no
    timeout covers a name server that does not answer.

    Returns:
      An empty string, or why the file cannot be had.
    """
    import requests

    answer: list[str] = []

    def ask() -> None:
        try:
            with requests.get(url, stream=True, timeout=seconds / 2) as response:
                answer.append("" if response.ok else f"HTTP status {response.status_code} {response.reason}")
        except requests.RequestException as error:
            answer.append(_first_cause(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else f"no answer within {seconds:g} s"


def _first_cause(error: BaseException) -> str:
    """The innermost message of requests' nested errors, without the addresses of objects."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    text = str(reason or error).rpartition("object at 0x")[2].partition(": ")[2] or str(reason or error)
    return f"{type(reason or error).__name__}: {text[:160]}"


def _unpack(archive: Path, target: Path) -> Path:
    """Unpacks the data set's files below `target`, all or nothing; another process may do the same at the same time."""
    names = [f"{FOLDER}/{batch.name}" for batch in (*TRAIN_FILES, *TEST_FILES)] + [f"{FOLDER}/batches.meta.txt"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="incomplete.") as scratch:
        folder = Path(scratch) / "whole" / FOLDER
        folder.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            for name in names:
                try:
                    source = tar.extractfile(name)
                except KeyError:
                    source = None
                if source is None:
                    raise tarfile.ReadError(f"it has no file {name}")
                with source, (folder / Path(name).name).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        try:
            folder.parent.rename(target)
        except OSError:
            if not (target / FOLDER).is_dir():
                raise
    return target / FOLDER


def _tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise DataUnavailableError(
            f"downloading CIFAR-10 needs tensorflow-datasets ({error}): pip install 'jaxremat[experiments]'"
        ) from None
    return tensorflow_datasets
