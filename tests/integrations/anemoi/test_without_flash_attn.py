"""Models that name flash-attn, built and read where it is not installed."""

import copy
import io
import pickletools
import sys
import zipfile
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.attention import MultiHeadSelfAttention
from anemoi.models.layers.utils import load_layer_kernels
from packaging.version import Version
from support.same_numbers import assert_same

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import window_attention, without_flash_attn

NODES = 40
NAMES = {
    "flash-attn 2": "flash_attn.flash_attn_interface",
    "flash-attn 3": "flash_attn_interface",
    "flash-attn 4": "flash_attn.cute.interface",
}


def attention_of(implementation="flash_attention", **options):
    torch.manual_seed(0)
    defaults = {"layer_kernels": load_layer_kernels(), "window_size": 5}
    return MultiHeadSelfAttention(
        2, 16, attention_implementation=implementation, **(defaults | options)
    ).double()


def rows(batch=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch * NODES, 16, generator=generator, dtype=torch.float64)


def compute(attention, batch=2):
    return attention(rows(batch), GraphShardInfo(), batch)


def built(**options):
    with integration.install():
        return attention_of(**options)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file


def read(file):
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_environment_of_the_tests_has_no_flash_attn():
    assert find_spec("flash_attn") is None
    with pytest.raises(ImportError, match="Flash attention is not installed"):
        attention_of()


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"window_size": None}], ids=str)
def test_a_config_that_names_flash_attention_is_built_under_install(options):
    expected = compute(attention_of("scaled_dot_product_attention", **options))
    attention = built(**options)
    assert "flash_attn" not in sys.modules
    assert_same(compute(attention), expected)
    with integration.install():
        assert_same(compute(attention), expected)
    # without a checkpoint, only `install` builds it
    with pytest.raises(ImportError, match="Flash attention is not installed"):
        attention_of()


def test_softcap_and_alibi_are_computed_by_definition():
    attention = built(softcap=0.3, use_alibi_slopes=True)
    query, key, value = (
        layer(rows()).unflatten(0, (2, NODES)).unflatten(-1, (2, 8)).transpose(1, 2)
        for layer in (attention.lin_q, attention.lin_k, attention.lin_v)
    )
    i = torch.arange(NODES)
    distance = (i - i[:, None]).abs()
    s = 0.3 * torch.tanh(query @ key.transpose(-1, -2) / 8**0.5 / 0.3)
    s = s - attention.alibi_slopes[:, None, None] * distance
    out = s.masked_fill(distance > 5, float("-inf")).softmax(-1) @ value
    expected = attention.projection(out.transpose(1, 2).reshape(-1, 16))
    assert_same(compute(attention), expected, tolerance=1e-6)  # slopes are float32


def with_rotary(monkeypatch, **options):
    """Build rotary embeddings, whose version anemoi-models 0.19 compares as text with a number."""
    monkeypatch.setattr(without_flash_attn, "VERSION", Version("2.8.3"))
    names = without_flash_attn.FLASH_ATTN_2["flash_attn"] | {"__version__": Version("2.8.3")}
    monkeypatch.setitem(without_flash_attn.FLASH_ATTN_2, "flash_attn", names)
    return built(use_rotary_embeddings=True, **options)


def test_rotary_embeddings_turn_queries_and_keys_by_their_position(monkeypatch):
    attention = with_rotary(monkeypatch, window_size=None)
    query, key, value = (
        layer(rows()).unflatten(0, (2, NODES)).unflatten(-1, (2, 8)).transpose(1, 2)
        for layer in (attention.lin_q, attention.lin_k, attention.lin_v)
    )

    def turned(x):
        """Rotate pairs (k, k + 4) of 8 channels, as complex numbers."""
        pairs = torch.complex(x[..., :4], x[..., 4:])
        theta = torch.arange(NODES)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
        pairs = pairs * torch.polar(torch.ones_like(theta), theta)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    p = (turned(query.double()) @ turned(key.double()).transpose(-1, -2) / 8**0.5).softmax(-1)
    expected = attention.projection((p @ value).transpose(1, 2).reshape(-1, 16))
    assert_same(compute(attention), expected, tolerance=1e-6)


@pytest.fixture
def flash_attn(monkeypatch):
    """Modules like those of flash-attn, whose functions cannot compute; call the result to remove them."""
    modules = {}
    names = ("flash_attn", "flash_attn.layers", "flash_attn.layers.rotary", "flash_attn.cute")
    for name in (*names, *NAMES.values()):
        modules[name] = ModuleType(name)
        modules[name].__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])

    def function_of(name):
        def flash_attn_func(*args, **kwargs):
            raise AssertionError("it needs a GPU")

        flash_attn_func.__module__ = name
        flash_attn_func.__qualname__ = "flash_attn_func"
        return flash_attn_func

    for name in NAMES.values():
        modules[name].flash_attn_func = function_of(name)
        parent = modules.get(name.rpartition(".")[0])
        if parent is not None:
            parent.flash_attn_func = modules[name].flash_attn_func
    modules["flash_attn"].__version__ = "2.8.3"

    def present(package):
        """Put the modules in place that one version of flash-attn has."""
        keep = NAMES[package]
        for name, module in modules.items():
            is_there = name == keep or keep.startswith(f"{name}.")
            if package == "flash-attn 2" and not name.startswith("flash_attn.cute"):
                is_there = is_there or name.startswith("flash_attn.")
            monkeypatch.setitem(sys.modules, name, module if is_there else None)

    def absent():
        for name in modules:
            monkeypatch.delitem(sys.modules, name, raising=False)

    return present, absent


@pytest.mark.parametrize("package", NAMES)
def test_a_model_pickled_with_flash_attn_is_read_and_computes_the_same(package, flash_attn, caplog):
    present, absent = flash_attn
    expected = compute(attention_of("scaled_dot_product_attention"))
    present(package)
    attention = attention_of()
    assert attention.attention.attention.__module__ == NAMES[package]
    file = saved(attention)
    absent()
    with pytest.raises(ModuleNotFoundError, match="No module named 'flash_attn"):
        read(file)
    window_attention._log_once.cache_clear()
    caplog.set_level("INFO", logger="anemoi_gt")
    with integration.flash_attn_stand_in():
        assert find_spec("flash_attn") is not None
        attention = read(file)
    assert "functions of anemoi_gt stand in for it" in caplog.text
    assert not any(name.startswith("flash_attn") for name in sys.modules)
    assert_same(compute(attention), expected)
    assert_same(compute(copy.deepcopy(attention)), expected)
    with integration.install():
        assert_same(compute(attention), expected)


@pytest.mark.parametrize("package", NAMES)
def test_where_flash_attn_is_installed_nothing_stands_in_for_it(package, flash_attn):
    present, _ = flash_attn
    present(package)
    with integration.install(), integration.flash_attn_stand_in():
        attention = attention_of()
    assert attention.attention.attention is sys.modules[NAMES[package]].flash_attn_func


def test_flash_attn_built_for_another_pytorch_counts_as_missing(monkeypatch, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    broken = 'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E")'
    (tmp_path / "flash_attn" / "__init__.py").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = compute(attention_of("scaled_dot_product_attention"))
    assert_same(compute(built()), expected)


def test_a_model_with_the_stand_in_is_pickled_by_the_names_of_flash_attn(flash_attn, monkeypatch):
    present, absent = flash_attn
    attention = with_rotary(monkeypatch)
    expected = compute(attention)
    file = saved(attention)
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        words = {str(word) for _, word, _ in pickletools.genops(archive.read(name))}
    assert not any("anemoi_gt" in word for word in words)
    with integration.flash_attn_stand_in():
        assert_same(compute(read(file)), expected)
    present("flash-attn 2")
    made = []
    monkeypatch.setattr(
        sys.modules["flash_attn.layers.rotary"], "RotaryEmbedding", made.append, raising=False
    )
    model = read(file)
    assert model.attention.attention is sys.modules["flash_attn"].flash_attn_func
    assert made == [8]
    absent()


def test_a_model_is_built_with_flash_attn_2_while_a_checkpoint_is_read():
    """That of flash-attn 4, which anemoi-models prefers, has neither softcap nor ALiBi."""
    with integration.install(), integration.flash_attn_stand_in():
        attention = attention_of(softcap=1.0)
    assert not attention.attention.use_flash_attn_v4
    assert_same(compute(attention), compute(built(softcap=1.0)))


def test_slopes_of_another_number_of_heads_raise():
    query = torch.randn(1, NODES, 2, 8)
    with pytest.raises(ValueError, match=r"alibi_slopes must be \[2\] or \[1, 2\].*got \[4\]"):
        without_flash_attn.flash_attn_func(query, query, query, alibi_slopes=torch.ones(4))


def test_a_causal_window_and_autocast_are_those_of_flash_attn():
    query = torch.randn(1, NODES, 2, 8)
    expected = without_flash_attn.flash_attn_func(query, query, query, window_size=(5, 0))
    actual = without_flash_attn.flash_attn_func(
        query, query, query, causal=True, window_size=(5, 5)
    )
    assert_same(actual, expected, tolerance=0)
    with torch.autocast("cpu", torch.bfloat16):
        actual = without_flash_attn.flash_attn_func(query, query, query, window_size=(5, 0))
    assert actual.dtype == torch.bfloat16
    assert_same(actual.float(), expected, tolerance=2e-2)
