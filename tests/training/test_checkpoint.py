"""Damaged checkpoints are refused. The state of a run is in test_resume.py, atomic writes are in test_files.py."""

import random
import re

import pytest
import torch

from anemoi_gt.training.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "last.pt"
    save_checkpoint(path, {"average": {f"layer {i}": torch.randn(1000) for i in range(30)}, "step": 7})
    return path.read_bytes()


def assert_is_refused(path, content):
    """The bytes must be refused with one sentence, whatever PyTorch raises."""
    path.write_bytes(content)
    sentence = f"a checkpoint must be a whole file that training wrote, {path} cannot be read"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load_checkpoint(path)


@pytest.mark.parametrize("kept", [0, 1, 3, 100, 1_000, 5_000, 20_000, 40_000, 69_000, 100_000, -100, -1])
def test_a_checkpoint_that_was_cut_off_is_one_sentence(content, tmp_path, kept):
    assert_is_refused(tmp_path / "last.pt", content[:kept])


def test_noise_and_a_checkpoint_with_flipped_bytes_are_one_sentence(content, tmp_path):
    noise = random.Random(0)
    for size in (1, 2, 5, 50, 500, 5000):
        assert_is_refused(tmp_path / "last.pt", noise.randbytes(size))
    pickled = range(content.index(b"data.pkl"), content.index(b"data.pkl") + 3000)
    for _ in range(100):
        flipped = bytearray(content)
        for place in noise.sample(pickled, 20):
            flipped[place] ^= noise.randrange(1, 256)
        assert_is_refused(tmp_path / "last.pt", flipped)


def test_a_file_that_the_system_refuses_to_read_keeps_the_refusal(content, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    path.write_bytes(content)

    def refused(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(type(path), "read_bytes", refused)
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        load_checkpoint(path)
