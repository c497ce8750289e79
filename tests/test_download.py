"""TFDS as downloader and cache, against a server of this machine; no test leaves it."""

import contextlib
import functools
import http.server
import socket
import tarfile
import threading

import pytest
import requests

from experiments import download
from experiments.cifar_files import FOLDER, TEST_FILES, TRAIN_FILES, URL
from experiments.errors import DataError, DataUnavailableError

checksums = pytest.importorskip("tensorflow_datasets.core.download.checksums")

NAMES = [batch.name for batch in (*TRAIN_FILES, *TEST_FILES)]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(folder):
    """Serves a folder; yields its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def packed(tmp_path):
    """An archive like CIFAR-10's, whose files hold their own names."""
    folder = tmp_path / "site" / FOLDER
    folder.mkdir(parents=True)
    for name in [*NAMES, "batches.meta.txt"]:
        (folder / name).write_text(name)
    with tarfile.open(tmp_path / "site" / "cifar.tar.gz", "w:gz") as tar:
        tar.add(folder, FOLDER)
    return tmp_path / "site" / "cifar.tar.gz"


def archive_at(address, packed):
    return download.Archive(f"{address}/{packed.name}", checksums.compute_url_info(packed))


def test_the_first_run_downloads_and_the_next_ones_ask_nobody(tmp_path, packed):
    cache = tmp_path / "cache"
    with serving(packed.parent) as address:
        archive = archive_at(address, packed)
        assert download.find_extracted(cache, archive) is None
        folder = download.fetch(cache, archive)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*NAMES, "batches.meta.txt"])
    assert all((folder / name).read_text() == name for name in NAMES)
    assert download.find_extracted(cache, archive) == folder
    assert download.fetch(cache, archive) == folder  # the server is gone
    for name in NAMES:  # and the archive alone is enough
        (folder / name).unlink()
    (folder / "batches.meta.txt").unlink()
    folder.rmdir()
    folder.parent.rmdir()
    assert (download.fetch(cache, archive) / NAMES[0]).read_text() == NAMES[0]
    assert [path.name for path in (cache / "downloads" / "extracted").iterdir()] == [folder.parent.name]


def test_an_archive_of_another_checksum_is_not_taken(tmp_path, packed):
    with serving(packed.parent) as address:
        archive = archive_at(address, packed)
        packed.write_bytes(packed.read_bytes() + b"x")
        with pytest.raises(DataUnavailableError, match=r"could not be brought into .*wrong checksum"):
            download.fetch(tmp_path / "cache", archive)
    assert download.find_extracted(tmp_path / "cache", archive) is None


@pytest.mark.parametrize("damage", ["truncated", "no gzip", "no such file inside"])
def test_a_damaged_cached_archive_is_named_and_leaves_nothing_behind(tmp_path, packed, damage):
    cache = tmp_path / "cache"
    with serving(packed.parent) as address:
        archive = archive_at(address, packed)
        folder = download.fetch(cache, archive)
    folder.parent.rename(tmp_path / "away")
    (cached,) = (cache / "downloads").rglob("*.tar.gz")
    if damage == "truncated":
        cached.write_bytes(cached.read_bytes()[:100])
    elif damage == "no gzip":
        cached.write_bytes(b"<html>")
    else:
        with tarfile.open(cached, "w:gz"):
            pass
    with pytest.raises(DataError, match="Delete it and run again") as caught:
        download.fetch(cache, archive)
    assert not isinstance(caught.value, DataUnavailableError)
    assert str(cached) in str(caught.value)
    assert list((cache / "downloads" / "extracted").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_unavailable(tmp_path, packed):
    (tmp_path / "cache").touch()
    with serving(packed.parent) as address, pytest.raises(DataUnavailableError, match="could not be brought"):
        download.fetch(tmp_path / "cache", archive_at(address, packed))


def test_probe_of_servers_that_answer(tmp_path):
    (tmp_path / "there").touch()
    with serving(tmp_path) as address:
        assert download.probe(f"{address}/there") == ""
        assert download.probe(f"{address}/gone") == "HTTP status 404 File not found"
    assert "Connection refused" in download.probe(f"{address}/there")


def test_probe_does_not_wait_for_a_server_or_a_name_server_that_is_silent(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert "timed out" in download.probe(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=0.5).lower()
    released = threading.Event()

    def hang(*args, **kwargs):
        released.wait()
        raise requests.ConnectionError

    monkeypatch.setattr("requests.get", hang)
    assert download.probe("http://silent.invalid/", seconds=0.1) == "no answer within 0.1 s"
    released.set()


def test_tfds_knows_the_archive_and_its_name_in_the_cache():
    archive = download.cifar10_archive()
    assert (archive.url, int(archive.info.size)) == (URL, 170_052_171)
    assert len(archive.cached_name) == len("*") + 43 + len(".tar.gz")  # 32 bytes in base64, without its padding


def test_a_cache_in_the_cloud_is_refused(monkeypatch):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", "gs://bucket/data")
    with pytest.raises(DataUnavailableError, match="must be a local folder"):
        download.cache_directory()
