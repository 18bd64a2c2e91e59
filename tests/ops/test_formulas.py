"""Operators of sub-layers, all by the same properties: accuracy against float64, registration, chunks, needs, what is kept."""

import pytest
import torch
from support import networks, sublayers
from support.accuracy import Corpus
from support.formulas import CASE, CASES, DRAW, attention, interaction, network, results_of
from support.opcheck import check_registration
from support.plans import new_plans
from support.same_numbers import assert_same

from anemoi_gt.ops.tensors import NetworkOptions, NormOptions
from anemoi_gt.ops.tree import leaf_types
from anemoi_gt.ops.triton_backend.packing import zero
from anemoi_gt.ops.triton_backend.plan import BoundFunction
from anemoi_gt.ops.triton_backend.tiles import OUTER_ROWS

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SIZES = networks.SIZES
ALL = pytest.mark.parametrize("name", DRAW)
ON_ROWS = ("feed-forward", "linear", "network")
NETWORK = ("norm_in_", "hidden_", "out_")  # the tensors of the network of a block


@pytest.fixture(autouse=True)
def small_chunks():
    """Several chunks of rows, the last of another size."""
    with new_plans(chunk=5, programs=3):
        yield


def add_case(corpus, name, device, dtype, **case):
    """Add the errors of a case, ours and plain PyTorch's."""
    problem = DRAW[name](device, dtype, **case)
    exact = results_of(problem, torch.float64, problem.plainly)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        plain = results_of(problem, None, problem.plainly)
    ours = results_of(problem)
    for result, expected in plain.items():
        assert ours[result].dtype == expected.dtype, (case, result)
    corpus.add_errors(ours, exact, plain)


def steps_of(plan):
    """Return the functions and the names of kernels of a plan."""
    return [
        getattr(step, "function", None) or step.launch.kernel.fn.__name__ for step in plan.steps
    ]


def kept_of(problem):
    """Return the number of bytes that a call keeps, besides its inputs and structure."""
    inputs = {name: tensor.requires_grad_() for name, tensor in problem.named.items()}
    out = next(iter(problem.ours(inputs).values()))
    given = {tensor.data_ptr() for tensor in problem.inputs() if tensor is not None}
    saved = [x for x in out.grad_fn.saved_tensors if x is not None and x.numel()]
    (block,) = [x for x in saved if x.dtype == torch.uint8 and x.data_ptr() not in given]
    return block.numel()


@pytest.mark.interpreted
@ALL
def test_corpus_errors_are_at_most_two_and_three_times_plain_pytorchs(name, kernel_device):
    """The dtype of products is one more option of a case: every two options meet, and errors are judged by dtype."""
    corpora = {}
    for seed, case in enumerate(CASES[name]):
        dtype = case["dtype"]
        # at the kink, rounding to 16 bits changes a derivative from 0 to 1: error of plain PyTorch, too
        if case.get("activation") == "relu":
            dtype = torch.float32
        corpus = corpora.setdefault(dtype, Corpus())
        add_case(corpus, name, kernel_device, **case | {"dtype": dtype}, seed=seed)
    assert set(corpora) == set(sublayers.DTYPES)
    for corpus in corpora.values():
        corpus.assert_accurate()


def test_cases_have_a_gradient_of_every_tensor():
    found = {}
    for name, cases in CASES.items():
        for case in cases:
            problem = DRAW[name]("cpu", **case)
            found.setdefault(problem.kind, set()).update(problem.named)
    for kind, names in found.items():
        assert names == set(leaf_types(kind)), kind


@pytest.mark.parametrize("name", ["network", "interaction"])
def test_products_over_aligned_rows_and_those_beyond_are_as_accurate(name, kernel_device):
    corpus = Corpus()
    sizes = SIZES._replace(rows=140, edges=70)  # two chunks, of edges of two batch entries
    with new_plans(chunk=OUTER_ROWS + 10, programs=3):
        for hidden in ("one", "two gated"):
            case = CASE[name] | {"hidden": hidden, "sizes": sizes}
            add_case(corpus, name, kernel_device, torch.float16, **case)
    corpus.assert_accurate()


@ALL
def test_chunks_change_only_rounding(name, kernel_device):
    problem = DRAW[name](kernel_device, **CASE[name])
    in_chunks = results_of(problem)
    with new_plans(chunk=100, programs=3):
        whole = results_of(problem)
    for result, expected in in_chunks.items():
        torch.testing.assert_close(whole[result], expected, rtol=1e-4, atol=1e-4)


IN_16_BITS = {"hidden": "one", "norm": "none", "bias": False, "rows": "GEMM", "out": "GEMM"}
FEW = {"sizes": SIZES._replace(edges=8)}
REGISTERED = [
    ("feed-forward", {"norm": "bare", "gated": True}, torch.float32),
    ("feed-forward", {"norm": 4, "keep_hidden": False}, torch.float32),
    ("linear", {"norm": None, "columns": 11}, torch.bfloat16),
    ("network", {}, torch.float32),
    ("network", IN_16_BITS, torch.bfloat16),
    ("interaction", FEW, torch.float32),
    ("interaction", IN_16_BITS | FEW, torch.bfloat16),
    ("attention", {"biases": ()}, torch.float32),
    ("attention", {"norm": "bare", "halo": 0, "qk_norm": "bare"}, torch.bfloat16),
    ("attention", {"norm": "both", "nodes": "one set", "qk_norm": "none"}, torch.float32),
]


@pytest.mark.parametrize(("name", "case", "dtype"), REGISTERED)
@pytest.mark.usefixtures("filled_padding")
def test_forward_and_backward_operators_are_registered(name, case, dtype, kernel_device):
    problem = DRAW[name](kernel_device, dtype, **CASE[name] | case)
    operator = problem.operator
    options = operator.option_arguments(problem.options)
    detached, index = problem.inputs()[: operator.num_tensors], problem.index
    inputs = [None if x is None else x.clone().requires_grad_() for x in detached]
    check_registration(operator.op, (*inputs, *index, *options, True))
    save = True
    *outputs, kept = operator.op(*detached, *index, *options, save)
    # not of the sums of edges, an operator of their own
    grads = [x.to(y.dtype) for x, y in zip(problem.grads.values(), outputs, strict=False)]
    named = list(problem.named)
    for names in (named, named[-2:]):
        needs = list(problem.needs(names))
        arguments = (*detached, *index, *options, kept, *grads, needs)
        check_registration(operator.op_backward, arguments)


@pytest.mark.interpreted
@ALL
def test_a_gradient_does_not_depend_on_which_others_are_needed(name, kernel_device):
    sizes = sublayers.SMALL if name == "attention" else SIZES
    few = {"rows": 6, "edges": 5, "num_src": 4, "num_dst": 3}
    few = {field: size for field, size in few.items() if field in sizes._fields}
    problem = DRAW[name](kernel_device, **CASE[name], sizes=sizes._replace(**few))
    expected = results_of(problem)
    parameters = [
        key for key in problem.named if key.endswith(("weight", "bias", "scale", "shift"))
    ]
    rows = [key for key in problem.named if key not in parameters]

    def assert_same_gradients(keys, inputs, outputs):
        gradients = torch.autograd.grad(
            [outputs[key] for key in problem.grads],
            [inputs[key] for key in keys],
            list(problem.grads.values()),
            retain_graph=True,
        )
        for key, gradient in zip(keys, gradients, strict=True):
            assert torch.equal(gradient, expected[f"d{key}"]), (keys, key)

    def inputs_of(keys):
        return {key: x.detach().requires_grad_(key in keys) for key, x in problem.named.items()}

    for keys in (rows, parameters):  # the others are frozen
        inputs = inputs_of(keys)
        assert_same_gradients(keys, inputs, problem.ours(inputs))
    inputs = inputs_of(problem.named)
    outputs = problem.ours(inputs)
    # By each binary digit of their numbers: of any two, each is asked for without the other.
    numbered = list(enumerate(problem.named))
    for digit in range((len(numbered) - 1).bit_length()):
        for value in (0, 1):
            keys = [key for number, key in numbered if (number >> digit) & 1 == value]
            assert_same_gradients(keys, inputs, outputs)


# Products for weights: one of each matrix of packed weights in each chunk of rows. The attention's are
# over whole sets, those of its network in two chunks; edges have 12 chunks, their nodes one, but sources with a halo are two tensors in
# each of two batch entries.
PRODUCTS = {
    "feed-forward": 2 * 3,
    "network": 3 * (2 + 1 + 1),
    "interaction": 6 * (1 + 1 + 1) + 1 + 2 * 2,
    "attention": 3 + 2 * 2,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_frozen_linear_maps_cost_no_product(name, kernel_device):
    problem = DRAW[name](kernel_device, **CASE[name])
    is_frozen = {
        key
        for key in problem.named
        if key.endswith("_weight") and "map" not in key and key != "edge_weight"
    }
    trained = problem.backward_plan(problem.named)
    frozen = problem.backward_plan([key for key in problem.named if key not in is_frozen])
    assert len(frozen.steps) == len(trained.steps) - PRODUCTS[name]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case", [{"norm": 4, "batch": 2, "halo": 3}, {"nodes": "one set"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_has_the_bits_of_its_two_sublayers(case, dtype, kernel_device):
    problem = DRAW["attention"](kernel_device, dtype, feed_forward="gated", **case)
    options = problem.options

    def compute(named):
        one = {name: x for name, x in named.items() if not name.startswith(NETWORK)}
        (z,) = attention(one, problem.graph, options).values()
        other = {name: x for name, x in named.items() if name.startswith("norm_in")}
        for old, new in (("hidden", "network_first"), ("out", "network_out")):
            for name, x in named.items():
                if name.startswith(f"{old}_"):
                    other[name.replace(old, new)] = x
        of_network = NetworkOptions(
            NormOptions(), "gelu", dtype, dtype, residual=True, norm_in=options.norm_in
        )
        return network(other | {"x": z}, of_network)

    assert_same(results_of(problem), results_of(problem, compute=compute), tolerance=0)


def test_only_gradients_that_are_needed_cost_steps(kernel_device):
    def steps(names, **case):
        problem = DRAW["linear"](
            kernel_device, torch.bfloat16, sizes=SIZES._replace(rows=4), **case
        )
        return steps_of(problem.backward_plan(names))

    weights = ["network_out_weight", "network_out_bias"]
    assert "norm_bwd" in steps(["norm_in_scale"])
    assert "norm_bwd" not in steps(weights)
    assert "sum_columns" not in steps(["x", "norm_in_scale", "network_out_weight"])
    without = {"norm": None, "columns": 24, "out_columns": 8}
    assert len(steps(["x"], **without)) == 1
    assert steps(["network_out_bias"], **without) == [zero, "sum_columns", "sum_partial"]


@pytest.mark.parametrize("name", ON_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rows_give_zeros_of_the_dtypes_of_tensors(name, dtype, kernel_device):
    problem = DRAW[name](kernel_device, dtype, **CASE[name], sizes=SIZES._replace(rows=0))
    for result, gradient in results_of(problem).items():
        assert not gradient.any(), result
        if result.startswith("d"):
            assert gradient.dtype == problem.named[result[1:]].dtype, result


WIDTH, SRC, DST = sublayers.SMALL.width, sublayers.SMALL.num_src, sublayers.SMALL.num_dst
HEADS, EDGES = sublayers.SMALL.heads, sublayers.SMALL.edges
# elements in the dtype of products and in float32 besides weights, and the number of parts
KEPT = [
    ("feed-forward", {"norm": 4}, SIZES.rows * 2 * 40, 0, 2),
    ("feed-forward", {"norm": 4, "gated": False, "keep_hidden": False}, 0, 0, 1),
    ("linear", {"norm": "both"}, 0, 0, 1),
    ("linear", {"norm": None}, 0, 0, 1),
    ("network", {"hidden": "one gated"}, SIZES.rows * (2 * SIZES.hidden + SIZES.features), 0, 3),
    (
        "network",
        {"hidden": "two", "norm": "none"},
        SIZES.rows * (SIZES.hidden + SIZES.second),
        0,
        3,
    ),
    (  # an embedding recomputes its first layer
        "network",
        {"hidden": "two", "inputs": "x", "residual": False, "columns": 5},
        SIZES.rows * (SIZES.second + SIZES.out),
        0,
        3,
    ),
    (
        "interaction",
        {"hidden": "one gated"},
        2 * SIZES.edges * (2 * SIZES.hidden + SIZES.features),
        2 * SIZES.edges,  # the ends
        5,
    ),
    *(
        (
            "attention",
            {"norm": norm, "batch": 1, "halo": 0},
            # [q, y] and [k, v], the cast attributes, W^T q in 16 columns
            2 * (DST + SRC) * WIDTH + EDGES * sublayers.SMALL.edge_dim + DST * HEADS * 16,
            DST * HEADS + EDGES * HEADS,  # 1 / sum of exponentials, exponentials
            7,
        )
        for norm in ("both", 4)
    ),
]


@pytest.mark.parametrize(("name", "case", "narrow", "wide", "parts"), KEPT)
def test_cast_weights_and_what_is_not_computed_again_is_kept_and_nothing_else(
    name, case, narrow, wide, parts, kernel_device
):
    problem = DRAW[name](kernel_device, torch.bfloat16, **CASE[name] | case)
    # a key's bias has no effect without a norm; biases of edge and value, of node maps are stacked
    is_cast = ("weight", "bias")
    if name == "attention":
        is_cast = ("weight", "map_bias", "query_bias", "self_term_bias", "key_bias", "value_bias")
        narrow += SIZES.features + WIDTH  # biases of the projection, and of edges
    weights = sum(x.numel() for key, x in problem.named.items() if key.endswith(is_cast))
    num_bytes = 2 * (weights + narrow) + 4 * wide
    kept = kept_of(problem)
    assert num_bytes <= kept <= num_bytes + parts * 512 + 16 * len(problem.named)


@pytest.mark.parametrize(("norm", "gated"), [("both", False), ("bare", True), (4, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hidden_layer_computed_again_gives_the_bits_of_one_that_is_kept(
    norm, gated, dtype, kernel_device
):
    kept, computed_again = (
        results_of(
            DRAW["feed-forward"](
                kernel_device, dtype, norm=norm, gated=gated, keep_hidden=keep_hidden
            )
        )
        for keep_hidden in (True, False)
    )
    for result, expected in kept.items():
        assert torch.equal(computed_again[result], expected), result


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(
            ("linear", {"norm": None, "columns": columns, "out_columns": out})
            for columns in (8, 11)
            for out in (8, 13)
        ),
        *(
            (
                "network",
                {
                    "inputs": "x",
                    "residual": False,
                    "norm": "none",
                    "hidden": "two",
                    "columns": columns,
                    "sizes": SIZES._replace(out=out, second=24),
                },
            )
            for columns, out in ((11, 7), (24, 7), (11, 16))
        ),
    ],
)
def test_products_of_rows_in_16_bits_are_over_multiples_of_16_bytes(name, case, kernel_device):
    problem = DRAW[name](kernel_device, torch.bfloat16, **case)
    products = 0
    for plan in (problem.plans().forward_plan(save=True), problem.backward_plan(problem.named)):
        for step in plan.steps:
            if isinstance(step, BoundFunction) and step.function is not zero:
                for view in step.views:
                    buffer = plan.viewed[view].buffer
                    if len(buffer.shape) == 2:  # not a bias
                        products += 1
                        assert max(buffer.stride) * buffer.dtype.itemsize % 16 == 0, buffer
    assert products


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
    problem = DRAW["interaction"](
        kernel_device, batch=2, halo=3, nodes=nodes, sizes=SIZES._replace(**sizes)
    )
    exact = results_of(problem, torch.float64, problem.plainly)
    for result, value in results_of(problem).items():
        torch.testing.assert_close(value.double(), exact[result], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("used", ["edges", "sums"])
@pytest.mark.parametrize("norm", ["layer norm", "none"])
def test_either_output_of_an_edge_update_may_be_unused(used, norm, kernel_device):
    problem = DRAW["interaction"](kernel_device, batch=2, norm=norm)
    problem = problem._replace(grads={used: problem.grads[used]})
    exact = results_of(problem, torch.float64, problem.plainly)
    for result, value in results_of(problem).items():
        torch.testing.assert_close(value.double(), exact[result], rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("name", ["x_src", "halo", "x_dst", "edge_attr"])
@pytest.mark.parametrize(
    "change",
    [lambda x: x[:-1], lambda x: x[..., :-1], lambda x: x.repeat_interleave(2, -1)],
    ids=["fewer rows", "fewer columns", "more columns"],
)
@pytest.mark.parametrize("feed_forward", ["none", "plain"])
def test_rows_of_an_attention_that_do_not_fit_are_refused(
    name, change, feed_forward, kernel_device
):
    drawn = sublayers.draw_attention(kernel_device, batch=2, halo=3, feed_forward=feed_forward)
    named, _, graph, _, options = drawn
    with pytest.raises(ValueError, match=rf"^({name}|halo) must (have|be \[)"):
        attention(named | {name: change(named[name])}, graph, options)
