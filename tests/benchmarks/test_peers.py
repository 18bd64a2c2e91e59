"""Every peer computes what the oracle does: a wrong call would be a wrong comparison."""

import pytest
import torch
from suite import judge, peers
from suite.peers import compiled, eager


@pytest.fixture(params=peers.NAMES)
def peer(request, monkeypatch):
    """Each peer, made to run on a CPU."""
    if request.param == "compiled":  # traced as a whole, without the minute that a compiler takes
        traced = torch.compile(eager.attend, backend="eager", fullgraph=True, dynamic=False)
        monkeypatch.setattr(compiled, "attend", traced)
    if request.param.startswith("anemoi"):
        allow_interpreter()
    return peers.load(request.param)


def allow_interpreter():
    """Let anemoi's operators, registered for GPUs alone, run on a CPU in Triton's interpreter."""
    from anemoi.models.triton import gt as operators

    for operator in (operators.graph_transformer_attention, operators.graph_transformer_attention_backward):
        operator.register_kernel("cpu")(operator._init_fn)


@pytest.mark.parametrize("batch", (1, 2))
def test_attention_is_right(peer, tiny, drawn, tmp_path, batch):
    problem = tiny(dtype="bfloat16", batch=batch)
    judge.judge_attention(problem, drawn(problem, tmp_path), peer.attention)


@pytest.mark.parametrize("kind", ("structure", "structure_unstable"))
def test_structure_is_right(peer, tiny, drawn, tmp_path, kind):
    coo = drawn(tiny(), tmp_path).coo
    make = peer.structure and peer.structure(coo, kind)
    if make is not None:
        judge.judge_structure(coo, make())


def test_peers_say_why_they_cannot_run_on_a_cpu(tiny):
    reasons = {name: peers.load(name).unsupported_reason(tiny(), "cpu") for name in peers.NAMES}
    gpu_only = {name for name, reason in reasons.items() if reason}
    assert gpu_only == {"anemoi", "anemoi_cached"}
    assert reasons["anemoi"] == "its kernels run on a GPU"


def test_a_missing_package_is_named():
    assert peers.missing("no_such.package", "no-such-package") == "no-such-package is not installed"
    assert peers.missing("torch", "torch") is None


def test_every_peer_has_a_title_of_its_own():
    assert len({peers.load(name).TITLE for name in peers.NAMES}) == len(peers.NAMES)
