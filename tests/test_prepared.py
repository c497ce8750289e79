"""Prepared TFDS directories, written here without TensorFlow in the format that TFDS 4.9.10 writes."""

import hashlib
import io
import json
import struct

import numpy as np
import pytest

from experiments.cifar_files import BatchFile, encode_records
from experiments.data import read_directory
from experiments.errors import DataError

tf_example_pb2 = pytest.importorskip("tensorflow_datasets.proto").tf_example_pb2
Image = pytest.importorskip("PIL.Image")

SHARDS = 2


def make_message(name, image, label):
    example = tf_example_pb2.Example()
    feature = example.features.feature
    png = io.BytesIO()
    Image.fromarray(image).save(png, "PNG")
    feature["id"].bytes_list.value.append(name.encode())
    feature["image"].bytes_list.value.append(png.getvalue())
    feature["label"].int64_list.value.append(label)
    return example.SerializeToString()


def write_tfrecord(path, messages):
    path.write_bytes(b"".join(struct.pack("<Q", len(m)) + bytes(4) + m + bytes(4) for m in messages))


def write_array_record(path, messages):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for message in messages:
        writer.write(message)
    writer.close()


WRITERS = {"tfrecord": write_tfrecord, "array_record": write_array_record}


def prepare(directory, file_format="tfrecord", version="3.0.2"):
    """A data directory with 6 training and 4 test images, shuffled; returns its version's folder and the expectations."""
    random = np.random.default_rng(1)
    folder = directory / "cifar10" / version
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text(json.dumps({"name": "cifar10", "fileFormat": file_format}))
    arrays, specs = [], []
    for split, n in (("train", 6), ("test", 4)):
        images = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        labels = random.integers(0, 10, n)
        order = random.permutation(n)
        for shard in range(SHARDS):
            path = folder / f"cifar10-{split}.{file_format}-{shard:05d}-of-{SHARDS:05d}"
            messages = [make_message(f"{split}_{i:05d}", images[i], labels[i]) for i in order[shard::SHARDS]]
            WRITERS[file_format](path, messages)
        records = encode_records(images, labels)
        half = len(records) // 2
        parts = [records[:half], records[half:]] if split == "train" else [records]
        specs.append(
            [BatchFile(f"{split}{i}", len(p) // 3073, hashlib.md5(p).hexdigest()) for i, p in enumerate(parts)]
        )
        arrays += [images, labels]
    return folder, specs, arrays


@pytest.mark.parametrize("file_format", WRITERS)
def test_the_original_order_is_restored(tmp_path, file_format):
    folder, specs, arrays = prepare(tmp_path, file_format)
    for directory in (tmp_path, tmp_path / "cifar10", folder):
        for got, expected in zip(read_directory(directory, *specs), arrays, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_of_several_versions_the_newest_is_read(tmp_path):
    folder, _, _ = prepare(tmp_path, version="3.0.2")
    (folder / "dataset_info.json").write_text("an older version, not to be read")
    _, specs, arrays = prepare(tmp_path, version="3.0.10")
    np.testing.assert_array_equal(read_directory(tmp_path, *specs)[0], arrays[0])


def edit_info(**values):
    def damage(folder):
        path = folder / "dataset_info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def cut(count):
    def damage(folder):
        path = folder / "cifar10-train.tfrecord-00001-of-00002"
        path.write_bytes(path.read_bytes()[:-count])

    return damage


def garble(folder):
    (folder / "cifar10-train.tfrecord-00000-of-00002").write_bytes(b"\xff" * 500)


def foreign(folder):
    write_tfrecord(folder / "cifar10-train.tfrecord-00000-of-00002", [b"\xff\xff\xff"])


def unnamed(folder):
    write_tfrecord(folder / "cifar10-train.tfrecord-00000-of-00002", [b"\n\0"])


def other_pixels(folder):
    path = folder / "cifar10-test.tfrecord-00000-of-00002"
    write_tfrecord(path, [make_message(f"test_{i:05d}", np.zeros((32, 32, 3), np.uint8), 0) for i in range(4)])


def no_file(folder):
    path = folder / "cifar10-train.tfrecord-00000-of-00002"
    path.unlink()
    path.mkdir()


def fewer(folder):
    write_tfrecord(folder / "cifar10-train.tfrecord-00000-of-00002", [])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(1), ["train.tfrecord-00001-of-00002", "truncated"]),
        (cut(300), ["train.tfrecord-00001-of-00002", "truncated"]),
        (garble, ["train.tfrecord-00000-of-00002", "not a TFRecord file"]),
        (foreign, ["train.tfrecord-00000-of-00002", "damaged or foreign record"]),
        (unnamed, ["train.tfrecord-00000-of-00002", "damaged or foreign record"]),
        (other_pixels, ["what makes test0", "must have the MD5"]),
        (no_file, ["train.tfrecord-00000-of-00002", "must be a readable file"]),
        (fewer, ["must have 6 train images, has 3"]),
        (lambda folder: (folder / "cifar10-test.tfrecord-00001-of-00002").unlink(), ["missing", "1 of 2 files"]),
        (edit_info(name="mnist"), ["'cifar10', describes 'mnist'"]),
        (edit_info(fileFormat="parquet"), ["tfrecord, array_record, is in 'parquet'"]),
        (lambda folder: (folder / "dataset_info.json").write_text("{"), ["TFDS's description", "JSONDecodeError"]),
        (lambda folder: (folder / "dataset_info.json").write_text("[]"), ["TFDS's description"]),
    ],
)
def test_a_damaged_directory_is_one_clear_message(tmp_path, damage, words):
    folder, specs, _ = prepare(tmp_path)
    damage(folder)
    with pytest.raises(DataError) as caught:
        read_directory(tmp_path, *specs)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_damaged_array_record_is_named(tmp_path):
    folder, specs, _ = prepare(tmp_path, "array_record")
    path = folder / "cifar10-train.array_record-00000-of-00002"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="must be an array_record file"):
        read_directory(tmp_path, *specs)
