"""TensorFlow Datasets as downloader, cache and checksum of CIFAR-10, without TensorFlow.

TFDS cannot *prepare* or even unpack without TensorFlow; its download manager and its table of checksums need none. The
archive is unpacked here to where TFDS itself would unpack it, so either finds what the other left.
"""

import base64
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


def find_extracted(cache: Path) -> Path | None:
    """The folder of the binary files below a TFDS data directory, or None."""
    archive = f"*{_archive_suffix()}"
    found = sorted((cache / "downloads" / "extracted").glob(f"TAR_GZ.{archive}/{FOLDER}"))
    return found[0] if found else None


def fetch(cache: Path) -> Path:
    """Downloads CIFAR-10 unless its archive is cached, and unpacks it into the cache.

    Args:
      cache: a TFDS data directory.

    Returns:
      The folder of the binary files. Their contents are not checked here: the archive's SHA-256 is when it comes, and
      who reads the files checks them.

    Raises:
      DataUnavailableError: no network, a server that does not hand out the archive, or a cache that cannot be written.
      DataError: the cached archive is damaged.
    """
    tfds = _tfds()
    downloads = cache / "downloads"
    try:
        cached = [
            path for folder in (downloads, downloads / "cifar10") for path in folder.glob(f"*{_archive_suffix()}")
        ]
        if not cached:  # a cached archive is used without asking the network
            refusal = probe(URL)
            if refusal:
                raise DataUnavailableError(f"CIFAR-10 is not in {cache} and {URL} cannot be reached: {refusal}")
            print(f"downloading CIFAR-10 (162 MiB) from {URL} into {downloads}", file=sys.stderr)
        manager = tfds.download.DownloadManager(
            download_dir=downloads, dataset_name="cifar10", url_infos=_url_infos(), force_checksums_validation=True
        )
        archive = Path(os.fspath(manager.download(URL)))
        return _unpack(archive, downloads / "extracted" / f"TAR_GZ.{archive.name}")
    except DataError:
        raise
    except (tarfile.TarError, EOFError, zlib.error) as error:
        damaged = cached[0] if cached else downloads
        raise DataError(f"{damaged}: must be the archive of CIFAR-10: {error}. Delete it and run again.") from None
    except OSError as error:  # requests' errors too: they derive from it
        raise DataUnavailableError(f"CIFAR-10 could not be brought into {downloads}: {error}") from None
    except Exception as error:  # TFDS's own errors share no base: a wrong checksum, an HTTP status
        raise DataUnavailableError(f"CIFAR-10 could not be downloaded: {' '.join(str(error).split())[:300]}") from None


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


def _url_infos() -> Any:
    """TFDS's table of CIFAR-10's addresses, sizes and SHA-256 sums."""
    infos = _tfds().builder("cifar10").url_infos
    if URL not in infos:
        raise DataUnavailableError(f"this version of tensorflow-datasets does not know {URL}: use --data-dir")
    return infos


def _archive_suffix() -> str:
    """How the archive's name ends in TFDS's cache: its SHA-256 in base64, so a file of another content is never taken."""
    digest = base64.urlsafe_b64encode(bytes.fromhex(_url_infos()[URL].checksum)).decode().rstrip("=")
    return f"{digest}.tar.gz"
