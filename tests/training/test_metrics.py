"""Metrics as JSON lines."""

import json

import pytest

from anemoi_gt.training.metrics_log import MetricsFile, curve, read_metrics


def test_record_is_in_the_file_as_soon_as_it_is_written_and_nan_raises_because_json_has_none(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(split="train", step=1, loss=0.5)
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"split": "train", "step": 1, "loss": 0.5}
        with pytest.raises(ValueError, match="not JSON compliant"):
            metrics.write(split="train", step=1, loss=float("nan"))


def test_invalid_line_raises_with_its_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\0\0\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl must be a record in JSON, line 2 is not"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_curve_is_of_one_split():
    records = [{"split": split, "step": step, "loss": 1 / step} for step in (1, 2) for split in ("train", "valid")]
    assert curve(records, "valid") == ([1, 2], [1.0, 0.5])
