"""Names of earlier versions, in code, pickles and configs of users."""

import pickle

import pytest
from hydra.utils import instantiate

import anemoi_gt
from anemoi_gt import GraphTransformerConv, KernelConfig
from anemoi_gt.attention_config import AttentionConfig

PICKLED = (  # by 0.4.0: AttentionConfig("torch", "bf16", stable_sort=False)
    b"\x80\x02canemoi_gt.attention_config\nAttentionConfig\nq\x00)\x81q\x01}q\x02(X\x07\x00\x00\x00"
    b"backendq\x03X\x05\x00\x00\x00torchq\x04X\t\x00\x00\x00precisionq\x05X\x04\x00\x00\x00bf16q\x06"
    b"X\x0b\x00\x00\x00stable_sortq\x07\x89ub."
)
EXPECTED = KernelConfig("torch", "bf16", stable_sort=False)


def test_attention_config_is_the_same_class():
    assert anemoi_gt.AttentionConfig is AttentionConfig is KernelConfig
    assert isinstance(GraphTransformerConv(4, 4).config, AttentionConfig)


def test_a_pickle_of_0_4_0_loads_and_is_written_with_the_new_name():
    config = pickle.loads(PICKLED)
    assert config == EXPECTED
    assert b"anemoi_gt.kernel_config" in pickle.dumps(config, 2)


def test_a_layer_that_holds_the_older_name_loads():
    layer = GraphTransformerConv(4, 4, config=EXPECTED)
    saved = pickle.dumps(layer, 2).replace(
        b"canemoi_gt.kernel_config\nKernelConfig\n",
        b"canemoi_gt.attention_config\nAttentionConfig\n",
    )
    assert b"AttentionConfig" in saved
    assert pickle.loads(saved).config == EXPECTED


@pytest.mark.parametrize(
    "target", ["anemoi_gt.AttentionConfig", "anemoi_gt.attention_config.AttentionConfig"]
)
def test_a_config_with_the_older_target_is_instantiated(target):
    config = {"_target_": target, "backend": "torch", "precision": "bf16", "stable_sort": False}
    assert instantiate(config) == EXPECTED
