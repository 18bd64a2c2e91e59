"""Graph networks as PyG layers: numbers of both backends, forms of edges, compiled code, tools, and Anemoi's weights."""

import copy
import pickle
import warnings

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers.block import GraphConvMapperBlock, GraphConvProcessorBlock
from anemoi.models.layers.utils import load_layer_kernels
from support.accuracy import Corpus
from support.compiled import counting
from support.interaction_networks import CASES, DST, SRC, make
from support.operators import Operators
from support.refusals import raises
from support.same_numbers import assert_same, assert_same_numbers
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import Sequential

from anemoi_gt import GraphStructure, InteractionBlock, InteractionConv, KernelConfig
from anemoi_gt.nn import split_destinations

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of the interpreter
]
BACKENDS = ("torch", "triton")
OPERATORS = [f"anemoi_gt.{name}_triton.default" for name in ("interaction", "edge_sums", "network")]
both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def sums_in_order():
    """Make PyTorch sum over edges in one order on a GPU, as it does on a CPU."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def autocast(device, dtype=torch.bfloat16):
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@both
def test_corpus_errors_are_at_most_two_and_three_times_plain_pytorchs(backend, kernel_device):
    corpora = {torch.float32: Corpus(), torch.bfloat16: Corpus()}
    for seed, options in enumerate(CASES):
        case = dict(options)
        dtype = case.pop("dtype")
        corpus = corpora[dtype]
        problem = make(kernel_device, dtype, KernelConfig(backend), seed, **case)
        exact = problem.plain_results(torch.float64)
        results = problem.results(autocast=autocast(kernel_device, dtype))
        plain = problem.plain_results(autocast=autocast(kernel_device, dtype))
        for name, x in plain.items():
            assert results[name].dtype == x.dtype, (case, name)
        corpus.add_errors(results, exact, plain)
    for corpus in corpora.values():
        corpus.assert_accurate()


@both
def test_in_float64_gradients_are_those_of_finite_differences(backend):
    if backend == "triton":
        problem = make(config=KernelConfig("triton"))
        problem.block.double()
        inputs = {name: x.double() for name, x in problem.inputs.items()}
        raises(lambda: problem.call(**inputs), "'triton' cannot run here: .* got torch.float64")
        return
    problem = make(hidden_layers=2, nodes="one set", batch="none", edges=5)
    problem.block.double()
    inputs = [x.double().requires_grad_() for x in problem.inputs.values()]
    graph = problem.graph
    assert torch.autograd.gradcheck(lambda x, edges: problem.block(x, graph, edges), inputs)


@both
def test_only_the_triton_backend_computes_with_the_operators_of_graph_networks(
    backend, kernel_device
):
    problem = make(kernel_device, config=KernelConfig(backend))
    with Operators() as operators:
        problem.call()
    ours = [name for name in operators.names if name.startswith("anemoi_gt.")]
    assert ours == (OPERATORS if backend == "triton" else [])


@both
def test_isolated_destinations_get_a_sum_of_zero(backend, kernel_device):
    problem = make(kernel_device, config=KernelConfig(backend))
    _, sums = problem.call(problem.block.conv)
    assert not sums[:, -1].any()
    assert sums[:, problem.edge_index[1]].ne(0).any(-1).all()


@pytest.mark.compiled
def test_a_compiled_block_gives_the_bits_of_an_eager_one(kernel_device):
    """With kernels; tests of all compiled layers have this block with the backend torch."""
    counter, compiled, compilations = counting(), None, []
    for edges in (29, 17):
        problem = make(kernel_device, config=KernelConfig("triton"), edges=edges)
        if compiled is None:
            block = problem.block
            compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
        problem = problem._replace(block=block)
        assert_same(problem.results(compiled), problem.results(), tolerance=0)
        compilations.append(counter.frame_count)
    first, second = compilations
    assert second == first


@both
def test_a_batch_on_one_graph_matches_its_elements(backend, kernel_device):
    problem = make(kernel_device, config=KernelConfig(backend), batch="of nodes and edges")
    nodes, edges = problem.call()
    for entry in range(2):
        one = {name: x[entry] for name, x in problem.inputs.items()}
        assert_same(problem.call(**one), (nodes[entry], edges[entry]), tolerance=1e-5)


def test_an_empty_batch_gives_empty_results(kernel_device):
    problem = make(kernel_device, config=KernelConfig("triton"))
    nodes, edges = problem.call(
        **{name: x[:0] for name, x in problem.inputs.items()} | of_one(problem)
    )
    assert nodes.shape == (0, DST, 12)
    assert edges.shape == (0, 29, 24)


def of_one(problem):
    """Return the features of edges, which a batch shares."""
    return {"edge_attr": problem.inputs["edge_attr"]}


def adjacency(layout, edge_index, values):
    sizes = (DST, SRC, *values.shape[1:])
    coo = torch.sparse_coo_tensor(edge_index.flip(0), values, sizes, check_invariants=True)
    return coo.to_sparse_csr() if layout == "CSR" else coo.coalesce()


@both
def test_edges_in_every_form_give_the_same_results_in_the_callers_order(backend, kernel_device):
    problem = make(kernel_device, config=KernelConfig(backend), batch="none", edges=20)
    # a sparse matrix has no edge twice
    cells = torch.randperm(SRC * (DST - 1), generator=torch.Generator().manual_seed(0))[:20]
    edge_index = torch.stack([cells % SRC, cells // SRC]).to(kernel_device)
    problem = problem._replace(edge_index=edge_index)
    nodes, edges = problem.call()
    assert_same(problem.call(edges=edge_index), (nodes, edges), tolerance=0)
    by_pyg = EdgeIndex(edge_index, sparse_size=(SRC, DST))
    assert_same(problem.call(edges=by_pyg), (nodes, edges), tolerance=0)
    order = edge_index[1].argsort(stable=True)
    for reverse in (False, True):
        structure = GraphStructure.from_edge_index(
            edge_index[:, order], (SRC, DST), reverse=reverse
        )
        edge_attr = problem.inputs["edge_attr"][order]
        ordered = problem.call(edges=structure, edge_attr=edge_attr)
        assert_same(ordered, (nodes, edges[order]), tolerance=1e-6)
    for layout in ("CSR", "COO"):
        adj_t = adjacency(layout, edge_index, torch.arange(1.0, 21.0, device=kernel_device))
        order = adj_t.values().long() - 1
        edge_attr = problem.inputs["edge_attr"][order]
        ordered = problem.call(edges=adj_t, edge_attr=edge_attr)
        assert_same(ordered, (nodes, edges[order]), tolerance=1e-6)
        adj_t = adjacency(layout, edge_index, problem.inputs["edge_attr"])
        assert_same(problem.call(edges=adj_t, edge_attr=None), ordered, tolerance=0)


@both
def test_a_16_bit_precision_is_that_of_autocast_and_results_have_the_dtype_of_their_rows(
    backend, kernel_device
):
    for rows, dtype in (("float32", torch.float32), ("16 bits", torch.bfloat16)):
        problem = make(kernel_device, torch.bfloat16, KernelConfig(backend), rows=rows)
        expected = problem.results(autocast=autocast(kernel_device))
        assert expected["out"].dtype == expected["edges"].dtype == dtype
        problem.block.conv.config = KernelConfig(backend, precision="bf16")
        assert_same(problem.results(), expected, tolerance=0)


@both
def test_precision_float32_is_that_of_no_autocast(backend, kernel_device):
    problem = make(kernel_device, config=KernelConfig(backend, "fp32"), nodes="one set")
    expected = problem.results()
    results = problem.results(autocast=autocast(kernel_device))
    assert_same(results, expected, tolerance=0)
    conv = problem.block.conv
    halved = {name: x.bfloat16() for name, x in problem.inputs.items()}
    wide = problem.call(conv, **{name: x.float() for name, x in halved.items()})
    assert_same(problem.call(conv, **halved), tuple(x.bfloat16() for x in wide), tolerance=0)


def test_auto_selects_the_operators_only_in_16_bits(monkeypatch, kernel_device):
    # the interpreter counts as a GPU here
    backends = "anemoi_gt.ops.backends.BACKENDS"
    from anemoi_gt.ops.backends import BACKENDS as by_name

    served = by_name["triton"]._replace(why_not=lambda *call: None)
    monkeypatch.setattr(backends, by_name | {"triton": served})
    problem = make(kernel_device, config=KernelConfig("auto"))
    names = []
    for precision in (None, "bf16"):
        problem.block.conv.config = KernelConfig("auto", precision)
        with Operators() as operators:
            problem.call()
        names.append([name for name in operators.names if name.startswith("anemoi_gt.")])
    assert names == [[], OPERATORS]


@pytest.mark.parametrize(
    ("kind", "implementation"),
    ((GraphConvProcessorBlock, "mlp"), (GraphConvMapperBlock, "swiglu")),
)
@both
@pytest.mark.filterwarnings("ignore:mlp_implementation")
def test_weights_of_anemois_block_give_its_numbers(backend, implementation, kind, kernel_device):
    torch.manual_seed(0)
    theirs = kind(
        in_channels=16,
        out_channels=16,
        num_chunks=1,
        mlp_implementation=implementation,
        update_src_nodes=False,
        layer_kernels=load_layer_kernels(),
    )
    torch.manual_seed(0)
    ours = InteractionBlock(
        *(16, 16),
        hidden_layers=2,
        mlp_implementation=implementation,
        config=KernelConfig(backend),
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name  # by the same seed
    torch.nn.init.normal_(theirs.node_mlp.layer_norm.weight)
    ours.load_state_dict(theirs.state_dict())
    for block in (theirs, ours):
        block.to(kernel_device)
    x, edges = torch.randn(9, 16, device=kernel_device), torch.randn(29, 16, device=kernel_device)
    edge_index = torch.randint(9, (2, 29), device=kernel_device)

    def call_theirs(x, edges):
        if kind is GraphConvProcessorBlock:
            return theirs(x, edges, edge_index, GraphShardInfo(), None, (9, 9))
        shards = BipartiteGraphShardInfo()
        (_, nodes), edges = theirs((x, x), edges, edge_index, shards, None, (9, 9))
        return nodes, edges

    def results(call, block):
        leaves = [x.detach().requires_grad_(), edges.detach().requires_grad_()]
        outputs = call(*leaves)
        loss = sum(out.square().sum() for out in outputs)
        return [*outputs, *torch.autograd.grad(loss, [*leaves, *block.parameters()])]

    expected = results(call_theirs, theirs)
    assert_same_numbers(results(lambda x, edges: ours(x, edge_index, edges), ours), expected)


HOOKS = {
    "message hook": lambda block: block.conv.register_message_forward_hook(lambda *_: None),
    "hook of an activation": lambda block: block.conv.edge_mlp.mlp[1].register_forward_hook(
        lambda *_: None
    ),
    "hook of the node update": lambda block: block.node_mlp.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_falls_back_to_plain_pytorch_with_a_warning_whatever_the_backend(
    hook, kernel_device
):
    problem = make(kernel_device, config=KernelConfig("triton"))
    expected = problem.results()
    handle = HOOKS[hook](problem.block)
    with pytest.warns(UserWarning, match="falls back to plain PyTorch: its? .*has hooks"):
        assert_same_numbers(problem.results(), expected)
    handle.remove()
    assert_same(problem.results(), expected, tolerance=0)


class Doubled(InteractionConv):
    """A user's layer with another message."""

    def message(self, x_i, x_j, edge_attr):
        return 2 * super().message(x_i, x_j, edge_attr)


def activated_by_tanh(block):
    block.conv.edge_mlp.mlp[1] = torch.nn.Tanh()


def of_a_subclass(block):
    block.conv.__class__ = Doubled


CHANGES = {
    "its edge_mlp.mlp.1 is a .*Tanh": activated_by_tanh,
    "it is a .*Doubled, which overrides message": of_a_subclass,
    "its edge_mlp.mlp has 7 layers": None,
}


@pytest.mark.parametrize("refusal", CHANGES)
def test_a_named_backend_raises_for_what_it_does_not_compute_and_torch_computes_it(
    refusal, kernel_device
):
    change = CHANGES[refusal]
    problem = make(kernel_device, hidden_layers=3 if change is None else 1)
    if change is not None:
        expected = problem.call()
        change(problem.block)
        changed = problem.call()
        assert not torch.allclose(changed[1], expected[1])
    problem.block.conv.config = KernelConfig("triton")
    message = f"backend 'triton' cannot run InteractionConv: {refusal}"
    raises(problem.call, message.replace("InteractionConv", "(InteractionConv|Doubled)"))


class TwoBlocks(torch.nn.Module):
    """A model whose output is its nodes."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([InteractionBlock(6, 5) for _ in range(2)])

    def forward(self, x, edge_index, edge_attr):
        for block in self.blocks:
            x, edge_attr = block(x, edge_index, edge_attr)
        return x


def test_pygs_explainer_masks_the_edges_that_reach_a_node():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(8, (2, 25), generator=generator)
    mode = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        TwoBlocks().eval(),
        GNNExplainer(epochs=3),
        explanation_type="model",
        model_config=mode,
        edge_mask_type="object",
    )
    x, edges = torch.randn(8, 6, generator=generator), torch.randn(25, 5, generator=generator)
    mask = explainer(x, edge_index, edge_attr=edges, index=2).edge_mask
    assert mask[edge_index[1] == 2].gt(0).all()


def test_pygs_sequential_runs_it():
    problem = make(nodes="one set", batch="none")
    blocks = [problem.block, copy.deepcopy(problem.block)]
    names = "x, edge_index, edge_attr"
    model = Sequential(names, [(block, f"{names} -> x, edge_attr") for block in blocks])
    x, edges = problem.call()
    expected = problem.call(x_dst=x, edge_attr=edges)
    assert_same(problem.call(model), expected, tolerance=0)


def test_reset_parameters_draws_those_of_a_new_block():
    problem = make()
    torch.manual_seed(0)
    new = InteractionBlock((8, 12), 24, 16)
    torch.manual_seed(0)
    problem.block.reset_parameters()
    assert_same(dict(problem.block.state_dict()), dict(new.state_dict()), tolerance=0)


def test_copies_are_complete_and_independent():
    problem = make()
    expected = problem.call()
    for twin in (copy.deepcopy(problem.block), pickle.loads(pickle.dumps(problem.block))):
        assert_same(problem.call(twin), expected, tolerance=0)
        torch.nn.init.zeros_(twin.conv.edge_mlp.mlp[0].weight)
    assert_same(problem.call(), expected, tolerance=0)


def test_an_exported_block_is_plain_pytorch_which_a_named_backend_is_not(kernel_device):
    problem = make(kernel_device, nodes="one set", batch="none")
    arguments = (problem.inputs["x_dst"], problem.edge_index, problem.inputs["edge_attr"])
    program = torch.export.export(problem.block, arguments)
    assert_same(program.module()(*arguments), problem.call(), tolerance=1e-6)
    problem.block.conv.config = KernelConfig("triton")
    raises(
        lambda: torch.export.export(problem.block, arguments),
        "cannot run InteractionConv: an exported program",
    )


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of each size that a trace records
def test_a_traced_block_is_plain_pytorch(kernel_device):
    problem = make(kernel_device, config=KernelConfig("triton"), nodes="one set", batch="none")
    graph, expected = problem.graph, problem.call()

    class OnOneGraph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = problem.block

        def forward(self, x, edges):
            return self.block(x, graph, edges)

    inputs = (problem.inputs["x_dst"], problem.inputs["edge_attr"])
    traced = torch.jit.trace(OnOneGraph(), inputs, check_trace=False)
    assert "interaction_triton" not in str(traced.inlined_graph)
    assert_same(traced(*inputs), expected, tolerance=1e-5)


X = torch.ones(3, 4)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
ATTRIBUTES = torch.ones(3, 5)
CONV = InteractionConv(4, 5)
GRAPH = GraphStructure.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 2]]), 3)
WRONG = [
    (lambda: InteractionConv(0, 5), "in_channels must be at least 1, got 0"),
    (lambda: InteractionConv((4, 4, 4), 5), "too many values to unpack"),
    (lambda: InteractionConv(4, 5.0), "edge_dim must be an integer, got 5.0"),
    (lambda: InteractionConv(4, 0), "edge_dim must be at least 1, got 0"),
    (lambda: InteractionBlock(4, 5, 0), "hidden_dim must be at least 1, got 0"),
    (lambda: InteractionBlock(4, 5, hidden_layers=0), "hidden_layers must be at least 1, got 0"),
    (lambda: InteractionBlock(4, 5, mlp_implementation="tanh"), "mlp_implementation must be one"),
    (lambda: InteractionBlock(4, 5, config="triton"), "config must be a KernelConfig"),
    (lambda: CONV((X, X, X), EDGES, ATTRIBUTES), "too many values to unpack"),
    (lambda: CONV((X, None), EDGES, ATTRIBUTES), "x_dst must be a tensor .*, got NoneType"),
    (lambda: CONV(X[:, 1:], EDGES, ATTRIBUTES), r"x_src must have shape .*, got \(3, 3\)"),
    (lambda: CONV(X.double(), EDGES, ATTRIBUTES), "x_src must have the dtype of the weights"),
    (lambda: CONV(X, EDGES, ATTRIBUTES.double()), "edge_attr must have the dtype of the weights"),
    (lambda: CONV(X, EDGES, ATTRIBUTES[:, 1:]), r"edge_attr must have shape .*, got \(3, 4\)"),
    (lambda: CONV(X, EDGES[0], ATTRIBUTES), r"edge_index must have shape \[2, E\]"),
    (lambda: CONV(X, EDGES + 1, ATTRIBUTES), "edge_index"),
    (
        lambda: CONV(X, split_destinations(GRAPH, 2), ATTRIBUTES),
        "edge_index must be a tensor .*, got tuple",
    ),
    (lambda: CONV(X, "edges", ATTRIBUTES), "edge_index must be a tensor .*, got str"),
    (
        lambda: CONV(X, GraphStructure.from_edge_index(EDGES, 4), ATTRIBUTES),
        "x must have 4 rows, one per source of the graph",
    ),
    (
        lambda: InteractionBlock(4, 5, config=KernelConfig(precision="bf16")).bfloat16()(
            X.bfloat16(), EDGES, ATTRIBUTES.bfloat16()
        ),
        "with a precision must be float32, got torch.bfloat16; use .*precision=None",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_and_inputs_are_refused(wrong, message):
    raises(wrong, message)


@pytest.mark.parametrize("attributes", (ATTRIBUTES[1:], ATTRIBUTES[:1], ATTRIBUTES.expand(2, 3, 5)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_attributes_of_other_edges_raise(backend, attributes, kernel_device):
    conv = InteractionConv(4, 5, config=KernelConfig(backend)).to(kernel_device)
    inputs = (tensor.to(kernel_device) for tensor in (X, EDGES, attributes))
    with pytest.raises((RuntimeError, ValueError)):
        conv(*inputs)


# inputs of the networks of other libraries by number, in their order: of edges (x_i, x_j, e), and of nodes (x_i, s_i)
LIBRARIES = {
    "graph_weather": ((1, 0, 2), (0, 1), "edges"),
    "PhysicsNeMo": ((2, 1, 0), (1, 0), "edges"),
    "neural-lam": ((2, 1, 0), (0, 1), "updates"),
}


def network_of(widths):
    """Return a network as these libraries build it."""
    inputs, hidden, outputs = widths
    layers = (nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
    return nn.Sequential(*layers, nn.LayerNorm(outputs)).double()


def ordered(inputs, order):
    return torch.cat([inputs[number] for number in order], dim=-1)


@both
@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_of_other_libraries_give_their_numbers(library, backend, kernel_device):
    of_edges, of_nodes, sum_of = LIBRARIES[library]
    problem = make(kernel_device, sum_of=sum_of, batch="none", activation="silu")
    x_src, x_dst, edges = (
        problem.inputs[name].double() for name in ("x_src", "x_dst", "edge_attr")
    )
    edge_mlp = network_of((8 + 12 + 24, 16, 24)).to(kernel_device)
    node_mlp = network_of((12 + 24, 16, 12)).to(kernel_device)
    source, destination = problem.edge_index
    update = edge_mlp(ordered((x_dst[destination], x_src[source], edges), of_edges))
    terms = update if sum_of == "updates" else edges + update
    sums = torch.zeros(len(x_dst), 24, dtype=torch.float64, device=kernel_device)
    sums = sums.index_add(0, destination, terms)
    nodes = x_dst + node_mlp(ordered((x_dst, sums), of_nodes))

    block = problem.block
    block.conv.config = KernelConfig(backend)
    sizes = {"conv.edge_mlp": ((12, 8, 24), of_edges), "node_mlp": ((12, 24), of_nodes)}
    for (name, (widths, order)), theirs in zip(sizes.items(), (edge_mlp, node_mlp), strict=True):
        ours = block.get_submodule(name)
        weights = theirs[0].weight.split([widths[number] for number in order], dim=1)
        back = [order.index(number) for number in range(len(order))]
        ours.mlp[0].weight.data = ordered(weights, back).float()
        ours.mlp[0].bias.data = theirs[0].bias.float()
        ours.mlp[2].load_state_dict(theirs[2].state_dict())
        ours.layer_norm.load_state_dict(theirs[3].state_dict())
    found = problem.call()
    for actual, expected in zip(found, (nodes, edges + update), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@both
def test_a_condition_of_each_row_and_a_wrong_one(backend, kernel_device):
    problem = make(kernel_device, config=KernelConfig(backend), norm="conditional")
    shared = problem.inputs["cond"]
    rows = tuple(shared.expand(-1, number, -1) for number in (29, 9))
    assert_same(problem.call(cond=rows), problem.call(), tolerance=1e-6)
    # of the norm, or of the product by the map of a condition
    expected = r"cond must .*got \(2, 1, 2\)|shapes cannot be multiplied"
    with pytest.raises((ValueError, RuntimeError), match=expected):
        problem.call(cond=shared[..., :2])
    without = problem._replace(inputs={k: x for k, x in problem.inputs.items() if k != "cond"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the modules compute
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'cond'"):
            without.call()
