"""The runner of anemoi-inference, without a data set."""

import sys
from functools import cached_property

import torch
from support.anemoi_model import build, draw, graph_between, make_transformer_options

from anemoi_gt.integrations import anemoi as integration


def test_the_runner_reads_a_checkpoint_that_names_flash_attn(
    tmp_path, monkeypatch, anemoi_as_it_is
):
    from anemoi_gt.integrations.anemoi import inference

    graph = graph_between("O8", "O4")
    expected = build(graph, make_transformer_options(window=20))(draw(graph))["data"]
    path = tmp_path / "inference-last.ckpt"
    with integration.install():
        options = make_transformer_options(window=20, attention="flash_attention")
        torch.save(build(graph, options), path)

    class Built:
        """A runner, as far as it is used: the model is read as anemoi-inference 0.13.0 does."""

        @cached_property
        def model(self):
            return torch.load(path, weights_only=False)

    monkeypatch.setattr(inference.runner_registry, "from_config", lambda *_: Built())
    model = inference.AnemoiGTRunner(None).model
    assert "flash_attn" not in sys.modules
    torch.testing.assert_close(model(draw(graph))["data"], expected)
