"""The Slurm job of the page: it runs with stand-ins for Slurm's commands, which start its hosts on this machine."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.pages import ROOT, blocks

from distributed.test_application import ARGUMENTS, PATIENCE, steps_in

pytestmark = pytest.mark.ranks

STEPS = 40
# Starts the command on each node, passes SIGTERM on, and ends as the first that failed.
SRUN = """
tasks=()
for node in 0 1; do
    SLURM_NODEID=$node CUDA_VISIBLE_DEVICES= "$@" &
    tasks+=($!)
done
trap 'kill -TERM ${tasks[@]}' TERM
status=0
for task in ${tasks[@]}; do
    wait $task || wait $task || status=$?
done
exit $status
"""
SCONTROL = """
case "$*" in
    "show hostnames nodes[1-2]") printf '127.0.0.1\\n127.0.0.2\\n' ;;
    *) echo "$@" >> requeued ;;
esac
"""


def job():
    (script,) = (
        code
        for code in blocks(ROOT / "docs" / "distributed.md", "text")
        if code.startswith("#!/bin/bash")
    )
    return script


NOTICE = int(re.search(r"--signal=B:TERM@(\d+)", job())[1])  # s, from the signal to the time limit


@pytest.fixture
def start(tmp_path):
    """Start the job for a small model, with a rank on each of two hosts."""
    script, count = re.subn(r"--nproc-per-node=4", "--nproc-per-node=1", job())
    assert count == 1
    script, count = re.subn(
        r"data=\S+ data.path=FILE sharding=edges sharding.model=8 hydra.run.dir=runs/uk",
        " ".join(
            [
                *(argument for argument in ARGUMENTS if "training.steps" not in argument),
                f"training.steps={STEPS}",
                "sharding=edges",
                "sharding.model=2",
            ]
        ),
        script,
    )
    assert count == 1
    (tmp_path / "job.sh").write_text(script)
    for name, code in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "nodes[1-2]",
        "SLURM_NNODES": "2",
    }

    def start():
        log = (tmp_path / "job.log").open("a")
        command = ["bash", "job.sh"]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)

    return start


# test_commands.py has the requeue, test_application.py runs on two hosts.
@pytest.mark.nightly
def test_the_job_on_two_hosts_is_requeued_after_the_signal_and_then_runs_to_its_end(
    start, tmp_path
):
    run, requeued, log = tmp_path / "run", tmp_path / "requeued", tmp_path / "job.log"
    process = start()
    end = time.monotonic() + PATIENCE
    while not steps_in(run) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.terminate()
    process.wait(PATIENCE)
    assert requeued.read_text() == "requeue 7\n", log.read_text()
    assert 0 < len(steps_in(run)) < STEPS
    requeued.unlink()
    assert start().wait(PATIENCE) == 0, log.read_text()
    assert steps_in(run) == list(range(1, STEPS + 1))
    assert not requeued.exists()


def test_the_variables_of_the_job_reach_torchrun_on_every_host(start, tmp_path):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nenv > host$SLURM_NODEID\necho "$@" > options$SLURM_NODEID\n')
    torchrun.chmod(0o755)
    assert start().wait(PATIENCE) == 0
    for node in range(2):
        values = dict(
            line.split("=", 1) for line in (tmp_path / f"host{node}").read_text().splitlines()
        )
        assert 30 < int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < NOTICE
        assert values["TRITON_CACHE_DIR"] == f"{tmp_path}/triton"
        assert values["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/inductor"
        options = (tmp_path / f"options{node}").read_text()
        expected = "--nnodes=2 --node-rank={} --master-addr=127.0.0.1 --master-port=29007 "
        assert options.startswith(expected.format(node)), options
