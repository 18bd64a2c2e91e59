"""A tiny problem, and configs of small Anemoi models."""

import pytest
from omegaconf import OmegaConf
from support.anemoi_model import make_family_options, make_options, make_transformer_options


@pytest.fixture
def tiny(monkeypatch):
    """A problem that every implementation computes in no time, the only one of the suite."""
    from suite import problems

    sizes = {"heads": 2, "channels": 8, "edge_dim": 3, "dtype": "float32"}
    tiny = problems.Problem("encoder-tiny-c8", "tiny", problems.Random(9, 7, 30), **sizes)
    monkeypatch.setattr(problems, "PROBLEMS", {tiny.name: tiny})
    return tiny


@pytest.fixture
def anemoi_configs(tmp_path):
    """A folder with `model/` as anemoi-training has it, with the layers of its models."""
    transformer = make_transformer_options(window=5, attention="flash_attention")
    del transformer["latent_aggregator"]
    models = {
        "graphtransformer": make_options(),
        "graphtransformer_ens": make_family_options("ensemble"),
        "graphtransformer_transport_edm": make_family_options("transport"),
        "transformer": transformer,
    }
    folder = tmp_path / "config"
    (folder / "model").mkdir(parents=True)
    for family, options in models.items():
        OmegaConf.save(options, folder / "model" / f"{family}.yaml")
    return folder
