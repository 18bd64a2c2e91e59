"""Checkpoints and pickled models go both ways between environments with us and without, with Triton and without."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.anemoi_model import build, differentiate, draw, make_options
from support.same_numbers import assert_same_numbers

from anemoi_gt.integrations import anemoi as integration

pytestmark = pytest.mark.process

WITHOUT_US = """
import sys
sys.modules.update(dict.fromkeys(["anemoi_gt", "triton"]))  # None: as if not installed
import torch
from pathlib import Path
folder = Path(sys.argv[1])
model = torch.load(folder / "model.pt", weights_only=False)
x = torch.load(folder / "x.pt")
torch.save(model(x)["data"].detach(), folder / "out.pt")
model.load_state_dict(torch.load(folder / "state.pt"))
torch.save(model(x)["data"].detach(), folder / "out_of_state.pt")
torch.manual_seed(1)
for parameter in model.parameters():
    parameter.data.normal_(std=0.1)
torch.save(model(x)["data"].detach(), folder / "trained_out.pt")
torch.save(model.state_dict(), folder / "trained_state.pt")
torch.save(model, folder / "trained_model.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, graph):
    """Files that a process with us wrote, and those that one without us made of them."""
    folder = tmp_path_factory.mktemp("files")
    install = {"_target_": "anemoi_gt.integrations.anemoi.install"}
    kernels = {"AnemoiGT": {"_target_": "builtins.dict", "install": install}}
    options = make_options()
    for component in (options["processor"], options["encoders"]["encoder"]["mapper"]):
        component["layer_kernels"] = options["layer_kernels"] | kernels
    model, x = build(graph, options), draw(graph)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    differentiate(model, x)
    optimiser.step()
    integration.swap_layers(model)
    torch.save(model, folder / "model.pt")
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(x, folder / "x.pt")
    torch.save(model(x)["data"].detach(), folder / "expected.pt")
    integration.uninstall()
    command = [sys.executable, "-c", WITHOUT_US, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder


def load(folder: Path, name):
    return torch.load(folder / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("name", ("out", "out_of_state"), ids=("whole model", "state dict"))
def test_what_we_trained_runs_without_us_and_without_triton(folder, name):
    assert_same_numbers(load(folder, name), load(folder, "expected"))


@pytest.mark.parametrize("state_dict", (False, True), ids=("whole model", "state dict"))
def test_what_was_saved_without_us_runs_with_us(folder, graph, attentions, state_dict):
    with integration.install():
        model = (
            build(graph, make_options())
            if state_dict
            else integration.swap_layers(load(folder, "trained_model"))
        )
        if state_dict:
            model.load_state_dict(load(folder, "trained_state"))
        assert_same_numbers(model(load(folder, "x"))["data"], load(folder, "trained_out"))
    assert attentions
