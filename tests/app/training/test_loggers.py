"""TensorBoard and MLflow get the records of metrics.jsonl, and a continued run goes on in both."""

import json
import sys

import mlflow
import pytest
from support import applications
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from anemoi_gt.app import train_command as train
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.loggers import numbers_of, open_logger

from ..conftest import SMALL

RUN = [*SMALL, "training.batch_size=2", "training.valid_every=2", "training.log_every=1"]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder of MLflow in place of a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "weather")
    mlflow.set_tracking_uri(None)
    yield mlflow.MlflowClient(tracking_uri=(tmp_path / "server").as_uri())
    mlflow.end_run()


def of_tensorboard(folder, name):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def of_mlflow(client, name):
    (experiment,) = [one for one in client.search_experiments() if one.name == "weather"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.batch_size"] == "2"
    return {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}


@pytest.mark.application
@pytest.mark.parametrize("logger", ["tensorboard", "mlflow"])
def test_a_logger_has_the_records_of_a_run_that_was_continued(
    logger, server, tmp_path, monkeypatch, start, without_pictures
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    start(train, *RUN, "training.steps=2", f"training.logger={logger}", "hydra.run.dir=run")
    start(train, "resume=true", "training.steps=4", "hydra.run.dir=run")  # with its logger
    records = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    for split in ("train", "valid"):
        expected = {one["step"]: one["loss"] for one in records if one["split"] == split}
        assert 4 in expected
        if logger == "tensorboard":
            logged = of_tensorboard(folder, f"{split}/loss")
        else:
            logged = of_mlflow(server, f"{split}/loss")
        assert logged == pytest.approx(expected)


def test_a_record_that_mlflow_refuses_is_a_warning(server, tmp_path, monkeypatch, caplog):
    def refused(*_, **__):
        raise mlflow.MlflowException("no connection")

    with open_logger("mlflow", tmp_path, {}, 0) as log_record:
        monkeypatch.setattr(mlflow, "log_metrics", refused)
        log_record({"split": "train", "step": 3, "loss": 0.5})
    assert "MLflow did not take the record of step 3: no connection" in caplog.text


def test_a_server_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch, start, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    arguments = (*RUN, "training.logger=mlflow", "hydra.run.dir=run")
    sentence = applications.last_error(capsys, start, train, *arguments)
    assert "MLflow must accept the run, set MLFLOW_TRACKING_URI to a server" in sentence


@pytest.mark.parametrize("package", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(package, tmp_path, monkeypatch, start, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    arguments = (*RUN, f"training.logger={package}")
    sentence = applications.last_error(capsys, start, train, *arguments)
    assert sentence.endswith(f"pip install 'anemoi-gt[{package}]'")


def test_an_unknown_logger_is_refused():
    message = "training.logger must be null or one of tensorboard, mlflow, got 'wandb'"
    with pytest.raises(ValueError, match=message):
        TrainingConfig(logger="wandb")


def test_texts_are_no_numbers():
    assert numbers_of({"split": "valid", "step": 1, "time": "now", "loss": 2}) == {
        "valid/loss": 2.0
    }
