"""Damaged checkpoints are refused; a written file holds the former content or the new one; metrics as JSON lines.

The state of a run is in test_resume.py.
"""

import json
import random
import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from io import BytesIO
from zipfile import ZipFile

import pytest
import torch

from anemoi_gt.app.training.run_files import (
    MetricsFile,
    annotate_oserror,
    atomic_write,
    load_checkpoint,
    read_metrics,
    save_checkpoint,
)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "last.pt"
    save_checkpoint(
        path, {"average": {f"layer {i}": torch.randn(1000) for i in range(30)}, "step": 7}
    )
    return path.read_bytes()


def assert_is_refused(path, content):
    """Assert that the bytes are refused in one sentence, whatever PyTorch raises."""
    path.write_bytes(content)
    sentence = re.escape(f"a checkpoint must be a whole file that training wrote, {path} ")
    with pytest.raises(ValueError, match=f"^{sentence}(cannot be read|is damaged: .*)$"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "kept", [0, 1, 3, 100, 1_000, 5_000, 20_000, 40_000, 69_000, 100_000, -100, -1]
)
def test_a_truncated_checkpoint_is_reported_in_one_sentence(content, tmp_path, kept):
    assert_is_refused(tmp_path / "last.pt", content[:kept])


def test_noise_and_a_checkpoint_with_flipped_bytes_are_reported_in_one_sentence(content, tmp_path):
    noise = random.Random(0)
    for size in (1, 2, 5, 50, 500, 5000):
        assert_is_refused(tmp_path / "last.pt", noise.randbytes(size))
    pickled = range(content.index(b"data.pkl"), content.index(b"data.pkl") + 3000)
    for _ in range(100):
        flipped = bytearray(content)
        for index in noise.sample(pickled, 20):
            flipped[index] ^= noise.randrange(1, 256)
        assert_is_refused(tmp_path / "last.pt", flipped)


def test_every_overwritten_byte_of_a_tensor_is_found_and_the_file_and_record_named(
    content, tmp_path
):
    path = tmp_path / "last.pt"
    (record,) = (name for name in ZipFile(BytesIO(content)).namelist() if name.endswith("data/7"))
    begin = content.index(ZipFile(BytesIO(content)).read(record))
    for size in (1, 2000):
        damaged = bytearray(content)
        damaged[begin : begin + size] = bytes(byte ^ 1 for byte in content[begin : begin + size])
        path.write_bytes(damaged)
        message = f"training wrote, {path} is damaged: {record} does not have its checksum$"
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path)


def test_a_file_that_the_system_refuses_to_read_keeps_the_refusal(content, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    path.write_bytes(content)

    def refused(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(type(path), "read_bytes", refused)
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        load_checkpoint(path)


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_file_is_replaced_when_the_block_ends_without_error(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"former")
    with pytest.raises(error) if error else nullcontext(), atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"former"
        if error:
            raise error
    assert path.read_bytes() == (b"former" if error else b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_with_the_file(tmp_path):
    path = tmp_path / "a"
    (tmp_path / "a.partial").symlink_to("/dev/full")
    with (
        pytest.raises(OSError, match=f"could not write {path}: No space left on device"),
        atomic_write(path) as file,
    ):
        file.write(b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_that_pytorch_wraps_is_named_too(tmp_path):
    with (
        pytest.raises(OSError, match=r"could not write .*a: File too large"),
        annotate_oserror(tmp_path / "a"),
    ):
        try:
            raise OSError(27, "File too large")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904  as PyTorch does


def test_other_errors_pass_as_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="^a tensor on meta$"), annotate_oserror(tmp_path / "a"):
        raise RuntimeError("a tensor on meta")


def test_metrics_that_cannot_be_written_name_their_file(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics._file.close()
    metrics._file = open("/dev/full", "w")  # noqa: SIM115  closed by the block below
    with (
        pytest.raises(OSError, match="could not write .*metrics.jsonl: No space left on device"),
        metrics,
    ):
        metrics.write(split="train", step=1, loss=0.5)


def test_record_is_in_the_file_as_soon_as_it_is_written_and_nan_raises_because_json_has_none(
    tmp_path,
):
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(split="train", step=1, loss=0.5)
        record = json.loads((tmp_path / "metrics.jsonl").read_text())
        assert abs(datetime.fromisoformat(record.pop("time")) - datetime.now(UTC)) < timedelta(
            0, 60
        )
        assert record == {"split": "train", "step": 1, "loss": 0.5}
        with pytest.raises(ValueError, match="not JSON compliant"):
            metrics.write(split="train", step=1, loss=float("nan"))


def test_invalid_line_raises_with_its_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\0\0\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl must be a record in JSON, line 2 is not"):
        read_metrics(tmp_path / "metrics.jsonl")
