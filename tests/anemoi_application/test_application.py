"""Anemoi's own commands with us: a data set from real weather, trainings from it on a CPU, a forecast from one of them.

`make test-anemoi` runs them in an environment where anemoi-training and its dependencies are
installed as users do.
"""

import hashlib
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
from pathlib import Path

import pytest
from anemoi_application import commands
from support.once import compute_once

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
COMMANDS = Path(sys.executable).parent
BLOCK = "anemoi.models.layers.block.GraphTransformerProcessorBlock"
RELATIVE = 3e-6  # of losses: sums in another order, over at most 6 steps of AdamW
BATCHES = 8  # of a training
SECONDS = 600  # a training or forecast takes one minute on two cores
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2", "--no-python")


def run(*command, import_first=(), **environment):
    """Run a command of Anemoi and return what it wrote; modules of `import_first` come before others.

    A command that does not end is killed with every process that it started, and fails the test.
    """
    paths = [*import_first, HERE, HERE.parent]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    changes = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    changes |= {name: str(value) for name, value in environment.items()}
    output = commands.new_file()
    script = COMMANDS / command[0]
    process = commands.start(script, *command[1:], environment=changes, output=output)
    process.join(SECONDS)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{command[0]} did not end within {SECONDS} s: {output.read_text()[-4000:]}")
    text = output.read_text()
    assert process.exitcode == 0, text[-4000:]
    return text


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id):
    """Return a result that tests share, even if several processes run them: once(what, compute)."""

    def call(what, compute):
        name = hashlib.sha256(what.encode()).hexdigest()  # overrides have characters of paths
        return compute_once(name, compute, tmp_path_factory, worker_id)

    return call


def make_data_set(folder, era5_path):
    """Make the data set in a folder, and return the folder."""
    recipe = folder / "recipe.yaml"
    grib = str(Path(era5_path).resolve())
    recipe.write_text((HERE / "recipe.yaml").read_text().replace("GRIB", grib))
    run("anemoi-datasets", "create", recipe, folder / "uk.zarr")
    return str(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, once, era5_path):
    """A folder with the data set, for trainings and forecasts."""
    return Path(
        once("data set", lambda: make_data_set(tmp_path_factory.mktemp("anemoi"), era5_path))
    )


def run_training(folder, launcher, config, *overrides):
    """Train with one of the configs here; return what `record_losses` has recorded, and the log.

    Trainings that run side by side share the data set and the folder of runs, and nothing else.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    arguments = (f"--config-dir={HERE}", f"--config-name={config}", *overrides)
    command = (*launcher, COMMANDS / "anemoi-training", "train", *arguments)
    log = run(*command, FOLDER=folder, OWN=own)
    return json.loads((own / "losses.json").read_text()) | {"log": log}


@pytest.fixture(scope="session")
def train(folder, once):
    """Train with one of the configs here and overrides, once; returns what it did and the id of its run."""

    def start(config, *overrides, launcher=()):
        what = " ".join(("train", *launcher, config, *overrides))
        return once(what, lambda: run_training(folder, launcher, config, *overrides))

    return start


def test_losses_equal_the_untouched_training(train, capsys):
    theirs, ours = train("untouched"), train("with_us")
    assert theirs["attentions"] == 0
    assert ours["attentions"] >= BATCHES * (2 + 1 + 1)
    assert len(theirs["losses"]) == BATCHES
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=RELATIVE)
    untouched, with_us = (statistics.median(run["seconds"]) for run in (theirs, ours))
    with capsys.disabled():
        print(
            f"\na batch: {untouched:.3f} s untouched, {with_us:.3f} s with us, ratio "
            f"{untouched / with_us:.2f}"
        )


def test_one_entry_installs_and_says_on_a_cpu_that_steps_are_eager(train):
    entry, ours = train("one_entry"), train("with_us")
    assert entry["losses"] == ours["losses"]
    assert entry["attentions"] == ours["attentions"]
    message = "CUDA graph disabled: a step that is captured in a CUDA graph"
    assert entry["log"].count(message) == 1


def test_losses_are_the_same_with_anemois_compile(train):
    compiled = train(
        "with_us",
        f"model.compile=[{{module: {BLOCK}, options: {{dynamic: false, backend: aot_eager}}}}]",
    )
    # blocks call us only while they are traced
    assert 0 < compiled["attentions"] < train("with_us")["attentions"]
    assert compiled["losses"] == pytest.approx(train("untouched")["losses"], rel=RELATIVE)


def test_trainings_go_on_from_a_checkpoint_in_either_direction(train):
    more = ("training.max_steps=6",)
    with_us = train("with_us", f"training.fork_run_id={train('untouched')['id']}", *more)
    without = train("untouched", f"training.fork_run_id={train('with_us')['id']}", *more)
    assert len(with_us["losses"]) == len(without["losses"]) == BATCHES // 2
    assert with_us["attentions"] > 0
    assert without["attentions"] == 0
    assert with_us["losses"] == pytest.approx(without["losses"], rel=RELATIVE)


def test_compiled_code_is_not_taken_for_an_export():
    # as anemoi-training resolves it: before 2.13 its own function is True in compiled code
    import torch

    from anemoi_gt.torch_compat import is_exporting

    assert torch.compile(lambda x: x + is_exporting(), backend="eager")(torch.zeros(1)) == 0


@pytest.mark.parametrize("launcher", ((), TORCHRUN), ids=("Lightning", "torchrun"))
def test_two_ranks_of_one_model_exchange_halos_with_us_and_have_the_losses_of_one(train, launcher):
    ranks = [f"system.hardware.num_gpus_per_{group}=2" for group in ("node", "model")]
    two, one = train("with_us", *ranks, launcher=launcher), train("untouched")
    assert two["exchanges"] >= BATCHES * (2 + 1 + 1)
    assert two["losses"] == pytest.approx(one["losses"], rel=RELATIVE)


def test_replays_on_two_ranks_have_the_bits_of_steps_that_ddp_reduces(train):
    ranks = [f"system.hardware.num_gpus_per_{group}=2" for group in ("node", "model")]
    replayed, eager = train("replayed", *ranks), train("with_us", *ranks)
    assert replayed["losses"] == eager["losses"]
    assert len(set(eager["losses"])) == BATCHES
    assert replayed["attentions"] > eager["attentions"] > 0  # in warm-up and capture


def run_forecast(folder, checkpoint, *overrides, launcher=(), import_first=()):
    """Run a forecast; return the name of its file, and the log."""
    file = Path(tempfile.mkdtemp(dir=folder)) / "forecast.nc"
    options = (
        f"checkpoint={checkpoint}",
        f"input.dataset.dataset={folder / 'uk.zarr'}",
        *overrides,
    )
    command = (*launcher, COMMANDS / "anemoi-inference", "run", HERE / "forecast.yaml")
    log = run(*command, f"output.netcdf.path={file}", *options, import_first=import_first)
    return str(file), log


@pytest.fixture(scope="session")
def forecast(folder, train, once):
    """Forecast with the checkpoint of a training, once; returns the temperature [time, point] and the log."""

    def start(config, *overrides, launcher=(), **options):
        import netCDF4

        checkpoint = folder / "out" / "checkpoint" / train(config)["id"] / "inference-last.ckpt"
        what = " ".join(("forecast", *launcher, config, *overrides))
        name, log = once(
            what, lambda: run_forecast(folder, checkpoint, *overrides, launcher=launcher, **options)
        )
        with netCDF4.Dataset(name) as file:
            return file.variables["2t"][:], log

    return start


IS_INSTALLED = "anemoi_gt is installed for 4 blocks"  # of the encoder, processor and decoder


@pytest.mark.parametrize("config", ("untouched", "with_us", "gnn"))
def test_the_runner_uses_anemoi_gt_logs_it_and_gives_the_same_forecast(forecast, config):
    theirs, log = forecast(config)
    assert IS_INSTALLED not in log
    ours, log = forecast(config, "runner=anemoi-gt")
    assert IS_INSTALLED in log
    assert ours.shape == theirs.shape
    assert ours.shape[0] == 3
    # kelvin, float32 at 280 K
    assert abs(ours - theirs).max() < 1e-3
    assert abs(ours[-1] - ours[0]).max() > 0.1


SPELLINGS = {  # options, the key of the cluster where ranks are spawned, and the launcher
    "around ours": (("runner.parallel.base_runner=anemoi-gt",), "runner.parallel", ()),
    "inside ours": (("runner.anemoi-gt.runner=parallel",), "runner.anemoi-gt", ()),
    "torchrun": (("runner.anemoi-gt.runner=parallel",), None, TORCHRUN),
}


def free_port():
    """Return a port that no process listens on; a run that was killed may hold upstream's default."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture
def prepared_ranks(tmp_path):
    """A folder with a `sitecustomize.py` for the ranks that anemoi-inference 0.13.0 spawns.

    They have no log handler. And they never end: a spawned process waits for its children before it
    shuts its process pools down, and one of those is a worker of the pool by which anemoi-datasets
    0.5.47 reports its usage. No setting closes that pool.
    """
    (tmp_path / "sitecustomize.py").write_text(
        """
import logging
import sys
from multiprocessing.util import Finalize

logging.basicConfig(level=logging.INFO)


def shut_pool_down():
    analytics = sys.modules.get("anemoi.datasets.usage.analytics")
    if analytics is not None:
        analytics._executor.shutdown()


Finalize(None, shut_pool_down, exitpriority=100)
"""
    )
    return tmp_path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_rank_of_a_parallel_forecast_computes_with_us(forecast, prepared_ranks, spelling):
    expected, _ = forecast("untouched")
    options, spawning, launcher = SPELLINGS[spelling]
    if spawning is not None:
        cluster = f"{spawning}.cluster.manual"
        options = (*options, f"{cluster}.world_size=2", f"{cluster}.port={free_port()}")
    ours, log = forecast(
        "untouched",
        *options,
        "verbosity=1",  # without one, ranks other than the first log nothing
        launcher=launcher,
        import_first=[prepared_ranks],
    )
    assert log.count(IS_INSTALLED) == 2
    assert abs(ours - expected).max() < 1e-3  # kelvin, float32 at 280 K


def test_a_training_of_a_graph_network_says_how_its_blocks_are_computed(train):
    layer_kernel = "+anemoi/layer_kernels@model.layer_kernels=anemoi_gt"
    log = train("gnn", layer_kernel, "hydra.searchpath=[pkg://anemoi_gt.configs]")["log"]
    of_model = "anemoi_gt computes blocks of AnemoiModelEncProcDec"
    (line,) = [line for line in log.splitlines() if of_model in line]
    assert "GraphConvProcessorBlock: " in line
    assert "upstream" in line
    assert "under 16-bit autocast" in line  # this training has 32 bits, on a CPU


def test_every_option_of_install_and_the_runner_to_wrap_are_keys_of_the_runner(forecast):
    theirs, _ = forecast("untouched")
    options = "runner=forecaster,backend=torch,precision=fp32,fusion=none"
    options += ",sharding=false,activation_checkpointing=none,keep_hidden=false"
    keys = [f"runner.anemoi-gt.{option}" for option in options.split(",")]
    ours, log = forecast("untouched", *keys)
    assert IS_INSTALLED in log
    # kelvin, float32 at 280 K
    assert abs(ours - theirs).max() < 1e-3


def test_the_runner_refuses_a_wrong_option(forecast):
    with pytest.raises(
        AssertionError, match="backend must be one of auto, triton, torch, got 'cuda'"
    ):
        forecast("untouched", "runner.anemoi-gt.backend=cuda")
