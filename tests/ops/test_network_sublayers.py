"""Networks on rows and the edge update: accuracy against float64, operator registration, and saved tensors."""

from functools import partial

import pytest
import torch
from support import networks, sublayers
from support.accuracy import Corpus
from support.nightly import nightly
from support.plans import new_plans

from anemoi_gt.ops.network_tensors import InteractionTensors, NetworkTensors
from anemoi_gt.ops.tree import leaf_types, leaves
from anemoi_gt.ops.triton_backend.edge_sums import sum_edges
from anemoi_gt.ops.triton_backend.interaction_sublayer import (
    interaction_sublayer,
    interaction_triton,
)
from anemoi_gt.ops.triton_backend.network_sublayer import network_sublayer, network_triton
from anemoi_gt.ops.triton_backend.plan import BoundFunction
from anemoi_gt.ops.triton_backend.sizes import IndexTensors
from anemoi_gt.ops.triton_backend.sublayer_steps import zero
from anemoi_gt.ops.triton_backend.tiles import OUTER_ROWS

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SIZES = networks.SIZES


@pytest.fixture(autouse=True)
def small_chunks():
    """Several chunks of rows, the last of another size."""
    with new_plans(chunk=5, programs=3):
        yield


def network(named, options):
    return {"out": network_sublayer(sublayers.fill(NetworkTensors, named), options)}


def interaction(named, graph, options):
    tensors = sublayers.fill(InteractionTensors, named)
    edges = interaction_sublayer(tensors, graph, options)
    return {"edges": edges, "sums": sum_edges(edges, graph, options.batch)}


def draw(name, device, dtype, **case):
    """Return tensors, gradients, and both computations of a case: plain PyTorch's and ours."""
    if name == "network":
        named, grads, options = networks.draw_network(device, dtype=dtype, **case)
        plainly = partial(networks.network_sublayer, options=options)
        return named, grads, plainly, partial(network, options=options)
    named, grads, graph, edge_index, options = networks.draw_interaction(
        device, dtype=dtype, **case
    )
    plainly = partial(networks.interaction_sublayer, edge_index=edge_index, options=options)
    return named, grads, plainly, partial(interaction, graph=graph, options=options)


OPERATORS = {
    "network": (NetworkTensors, network_triton),
    "interaction": (InteractionTensors, interaction_triton),
}
CASES = {"network": networks.NETWORK_CASES, "interaction": networks.INTERACTION_CASES}
CASE = {
    "network": {"inputs": "x and more"},
    "interaction": {"batch": 2, "segment": 2, "halo": 3},
}
BOTH = pytest.mark.parametrize("name", OPERATORS)


def add_case(corpus, name, device, dtype, **case):
    """Add the errors of a case, ours and plain PyTorch's, and return the names of its outputs."""
    named, grads, plainly, ours = draw(name, device, dtype, **case)
    exact = networks.results_of(plainly, named, grads, torch.float64)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        plain = networks.results_of(plainly, named, grads)
    results = networks.results_of(ours, named, grads)
    for result, expected in plain.items():
        assert results[result].dtype == expected.dtype, (case, result)
    corpus.add_errors(results, exact, plain)
    return set(grads)


@pytest.mark.interpreted
@BOTH
@pytest.mark.parametrize("dtype", sublayers.CORPUS_DTYPES, ids=str)
def test_corpus_errors_are_at_most_two_and_three_times_plain_pytorchs(name, dtype, kernel_device):
    kind, _ = OPERATORS[name]
    corpus = Corpus()
    for seed, case in enumerate(CASES[name]):
        # at the kink, rounding to 16 bits changes a derivative from 0 to 1: error of plain PyTorch, too
        if case["activation"] == "relu" and dtype != torch.float32:
            continue
        outputs = add_case(corpus, name, kernel_device, dtype, seed=seed, **case)
    assert set(corpus.ours) == outputs | networks.GRADIENTS[kind]
    corpus.assert_accurate()


@BOTH
def test_products_over_aligned_rows_and_those_beyond_are_as_accurate(name, kernel_device):
    corpus = Corpus()
    sizes = SIZES._replace(rows=140, edges=70)  # two chunks, of edges of two batch entries
    with new_plans(chunk=OUTER_ROWS + 10, programs=3):
        for hidden in ("one", "two gated"):
            case = CASE[name] | {"hidden": hidden, "sizes": sizes}
            add_case(corpus, name, kernel_device, torch.float16, **case)
    corpus.assert_accurate()


@pytest.mark.compiled
@BOTH
@pytest.mark.parametrize("dynamic", [True, *nightly((False,))])
def test_a_compiled_call_gives_the_bits_of_an_eager_one_and_so_does_another(
    name, dynamic, kernel_device
):
    torch.compiler.reset()
    call = {"network": network, "interaction": interaction}[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (13, 9):
        case = CASE[name] | {"sizes": SIZES._replace(rows=rows, edges=2 * rows)}
        named, grads, _, ours = draw(name, kernel_device, torch.float32, **case)
        eager, again, traced = (
            networks.results_of(partial(function, **ours.keywords), named, grads)
            for function in (call, call, compiled)
        )
        for result, expected in eager.items():
            assert torch.equal(again[result], expected), result
            assert torch.equal(traced[result], expected), result


@BOTH
def test_chunks_change_only_rounding(name, kernel_device):
    named, grads, _, ours = draw(name, kernel_device, torch.float32, **CASE[name])
    in_chunks = networks.results_of(ours, named, grads)
    with new_plans(chunk=100, programs=3):
        whole = networks.results_of(ours, named, grads)
    for result, expected in in_chunks.items():
        torch.testing.assert_close(whole[result], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.compiled
@BOTH
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ({"hidden": "two gated"}, torch.float32),
        ({"norm": "none", "bias": False, "rows": "GEMM", "out": "GEMM"}, torch.bfloat16),
    ],
    ids=["two gated", "without norm and biases"],
)
@pytest.mark.usefixtures("filled_padding")
def test_forward_and_backward_operators_pass_opcheck(name, case, dtype, kernel_device):
    kind, operator = OPERATORS[name]
    case = CASE[name] | {"sizes": SIZES._replace(edges=8)} | case
    named, grads, _, ours = draw(name, kernel_device, dtype, **case)
    options = leaves(ours.keywords["options"])
    index = ()
    if name == "interaction":
        index = IndexTensors.of(ours.keywords["graph"].with_reverse())
    detached = leaves(sublayers.fill(kind, named))
    inputs = [None if x is None else x.clone().requires_grad_() for x in detached]
    torch.library.opcheck(operator.op, (*inputs, *index, *options, True))
    save = True
    *outputs, kept = operator.op(*detached, *index, *options, save)
    # not of the sums, an operator of their own
    grads = [x.to(y.dtype) for x, y in zip(grads.values(), outputs, strict=False)]
    first = next(iter(named))
    for needs in (
        [x is not None for x in detached],
        [leaf == first for leaf in leaf_types(kind)],
    ):
        arguments = (*detached, *index, *options, kept, *grads, needs)
        torch.library.opcheck(operator.op_backward, arguments)


@pytest.mark.parametrize(("norm", "hidden"), [("layer norm", "one gated"), ("none", "two")])
@BOTH
def test_rows_before_activations_and_norm_and_cast_weights_are_kept_and_nothing_else(
    name, norm, hidden, kernel_device
):
    case = CASE[name] | {"norm": norm, "hidden": hidden}
    named, _, _, ours = draw(name, kernel_device, torch.bfloat16, **case)
    inputs = {name: tensor.requires_grad_() for name, tensor in named.items()}
    out = next(iter(ours(inputs).values()))
    given = {tensor.data_ptr() for tensor in inputs.values()}
    num_rows, num_bytes, parts = SIZES.rows, 0, 5
    if name == "interaction":
        graph = ours.keywords["graph"].with_reverse()
        given |= {x.data_ptr() for x in graph.state_dict().values()}
        num_rows = ours.keywords["options"].batch * SIZES.edges
        num_bytes = 2 * SIZES.edges * graph.row.element_size()  # ends of the edges
    (block,) = (x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == torch.uint8)
    weights = sum(x.numel() for key, x in named.items() if key.endswith(("weight", "bias")))
    width = 2 * SIZES.hidden + SIZES.features  # gated, and before the norm
    if hidden == "two":
        width = SIZES.hidden + SIZES.second
    num_bytes += 2 * (weights + num_rows * width)
    assert num_bytes <= block.numel() <= num_bytes + parts * 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_an_embedding_before_its_first_activation_are_not_kept(dtype, kernel_device):
    case = {"inputs": "x", "residual": False, "columns": 5, "hidden": "two"}
    named, _, _, ours = draw("network", kernel_device, dtype, **case)
    out = ours({name: tensor.requires_grad_() for name, tensor in named.items()})["out"]
    (block,) = (x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == torch.uint8)
    weights = sum(x.numel() for key, x in named.items() if key.endswith(("weight", "bias")))
    elements = weights + SIZES.rows * (SIZES.second + SIZES.out)
    num_bytes = elements * dtype.itemsize
    assert num_bytes <= block.numel() <= num_bytes + 3 * 512


@pytest.mark.parametrize(
    ("columns", "out"), [(11, 7), (24, 7), (11, 16)], ids=["both", "outputs", "inputs"]
)
def test_products_of_rows_in_16_bits_are_over_multiples_of_16_bytes(columns, out, kernel_device):
    case = {"inputs": "x", "residual": False, "norm": "none", "columns": columns}
    case |= {"sizes": SIZES._replace(out=out, second=24)}
    named, _, _, ours = draw("network", kernel_device, torch.bfloat16, hidden="two", **case)
    inputs = leaves(sublayers.fill(NetworkTensors, named))
    plans = network_triton.passes(inputs, ours.keywords["options"])
    needs = tuple(x is not None for x in inputs)
    backward, _ = plans.backward_plan(needs, (True,))
    products = 0
    for plan in (plans.forward_plan(save=True), backward):
        for step in plan.steps:
            if isinstance(step, BoundFunction) and step.function is not zero:
                for view in step.views:
                    buffer = plan.viewed[view].buffer
                    if len(buffer.shape) == 2:  # not a bias
                        products += 1
                        assert max(buffer.stride) * buffer.dtype.itemsize % 16 == 0, buffer
    assert products


@pytest.mark.interpreted
@BOTH
def test_a_gradient_does_not_depend_on_which_others_are_needed(name, kernel_device):
    case = CASE[name] | {"hidden": "two gated", "sizes": SIZES._replace(edges=8)}
    named, grads, _, ours = draw(name, kernel_device, torch.float32, **case)
    expected = networks.results_of(ours, named, grads)
    rows = [key for key in named if not key.startswith("network")]
    parameters = [key for key in named if key.startswith("network")]
    for needed in ([key] for key in named), (rows, parameters):
        for keys in needed:
            inputs = {key: x.detach().requires_grad_(key in keys) for key, x in named.items()}
            outputs = ours(inputs)
            gradients = torch.autograd.grad(
                [outputs[key] for key in grads], [inputs[key] for key in keys], list(grads.values())
            )
            for key, gradient in zip(keys, gradients, strict=True):
                assert torch.equal(gradient, expected[f"d{key}"]), (keys, key)


@BOTH
def test_a_frozen_network_costs_no_product_for_its_weights(name, kernel_device):
    kind, operator = OPERATORS[name]
    named, _, _, ours = draw(name, kernel_device, torch.float32, **CASE[name], hidden="two")
    index = ()
    if name == "interaction":
        index = IndexTensors.of(ours.keywords["graph"].with_reverse())
    inputs = (*leaves(sublayers.fill(kind, named)), *index)
    plans = operator.passes(inputs, ours.keywords["options"])
    has_grads = (True,)
    trained, frozen = (
        plans.backward_plan(tuple(key in keys for key in leaf_types(kind)), has_grads)[0]
        for keys in (set(named), {key for key in named if not key.startswith("network")})
    )
    # Of `first` for each kind of rows, of `second` and `out`, in chunks of rows. Nodes are whole, but
    # sources with a halo are two tensors in each of two batch entries.
    products = {"network": 3 * (2 + 1 + 1), "interaction": 12 * (1 + 1 + 1) + 1 + 2 * 2}[name]
    assert len(frozen.steps) == len(trained.steps) - products


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ("two sets", {"num_src": 0}),  # all sources are those of other ranks
        ("two sets", {"num_src": 0, "num_dst": 0, "edges": 0}),
        ("one set", {"num_dst": 0, "edges": 0}),
    ],
    ids=["no own sources", "two empty sets", "one empty set"],
)
def test_a_rank_without_nodes_of_its_own_gets_the_gradients_of_its_halo(
    nodes, sizes, kernel_device
):
    case = {"nodes": nodes, "sizes": SIZES._replace(**sizes)}
    named, grads, plainly, ours = draw(
        "interaction", kernel_device, torch.float32, batch=2, halo=3, **case
    )
    exact = networks.results_of(plainly, named, grads, torch.float64)
    for result, value in networks.results_of(ours, named, grads).items():
        torch.testing.assert_close(value.double(), exact[result], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("used", ["edges", "sums"])
@pytest.mark.parametrize("norm", ["layer norm", "none"])
def test_either_output_of_an_edge_update_may_be_unused(used, norm, kernel_device):
    named, grads, plainly, ours = draw(
        "interaction", kernel_device, torch.float32, batch=2, norm=norm
    )
    grads = {used: grads[used]}
    exact = networks.results_of(plainly, named, grads, torch.float64)
    for result, value in networks.results_of(ours, named, grads).items():
        torch.testing.assert_close(value.double(), exact[result], rtol=1e-4, atol=1e-5)


@BOTH
def test_second_derivatives_and_forward_mode_are_refused(name, kernel_device):
    named, _, _, ours = draw(name, kernel_device, torch.float32, **CASE[name])
    first = next(iter(named))
    x = named[first].requires_grad_()
    out = next(iter(ours(named).values()))
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"double backward is not supported by {name}, got"):
        gradient.sum().backward()

    def of_one(x):
        return ours(named | {first: x})

    x = x.detach()
    message = f"forward-mode derivatives are not supported by {name}, got an operand with a tangent"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(of_one, (x,), (x,))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[:, :-1]),
        ("network_out_weight", lambda weight: weight[:-1]),
        ("network_first_value_weight", lambda weight: weight.repeat(1, 2)),  # as of [x, x]
    ],
    ids=["inputs", "outputs", "a layer of twice the inputs"],
)
def test_rows_and_parameters_of_a_network_that_do_not_fit_are_refused(name, change, kernel_device):
    named, _, options = networks.draw_network(kernel_device)
    with pytest.raises(ValueError, match="must (take|have)"):
        network(named | {name: change(named[name])}, options)


@pytest.mark.parametrize("name", ["x_src", "halo", "x_dst", "edges"])
@pytest.mark.parametrize(
    "change", [lambda x: x[:-1], lambda x: x[:, :-1]], ids=["rows", "features"]
)
def test_rows_of_an_edge_update_that_do_not_fit_are_refused(name, change, kernel_device):
    named, _, graph, _, options = networks.draw_interaction(kernel_device, batch=2, halo=3)
    with pytest.raises(ValueError, match=r"must (take|have|be \[)"):
        interaction(named | {name: change(named[name])}, graph, options)
