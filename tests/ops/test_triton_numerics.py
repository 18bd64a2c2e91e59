"""What the Triton kernels do with logits that are large, equal, infinite or missing."""

import pytest
import torch
from support.accuracy import assert_accurate
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, structure

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings(  # numpy's, of the interpreter; a GPU gives none
    "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)


@pytest.mark.parametrize(("form", "dtype"), [("raw", DTYPES[0]), ("raw", DTYPES[1]), ("none", DTYPES[0])], ids=str)
@pytest.mark.parametrize("logit", [1e2, 1e4, 1e6])
def test_gradients_of_sharp_softmax_over_equal_values_are_of_rounding_size(logit, form, dtype, kernel_device):
    problem = make_problem(GRAPHS["hub"], 2, 8, 3, form, dtype)
    problem.query *= logit
    problem.value[:] = problem.value[0]
    problem.grad_lse.zero_()
    terms = [problem.value]
    if form == "raw":  # equal attributes too, so that every edge has the same value
        problem.edge_attr[:] = problem.edge_attr[0]
        terms.append((problem.edge_attr @ problem.edge_weight.T)[0].view(1, 2, 8))
        terms.append(problem.edge_bias.view(1, 2, 8))
    result = attend(problem, structure(GRAPHS["hub"], kernel_device), "triton")
    dp = problem.scale * sum((problem.grad_out[2].abs() * term[0].abs()).sum(-1).max() for term in terms)
    bound = 16 * torch.finfo(torch.float32).eps * dp * 40  # 40 edges arrive; whatever the dtype, ds is made in float32
    key = problem.key.abs().max() + sum(term.abs().max() for term in terms[1:])
    assert result["dquery"].abs().max() <= bound * key
    assert result["dkey"].abs().max() <= bound * problem.query.abs().max()


@pytest.mark.parametrize("edge_dim", [255, 256, 300])  # with the bias: all that a program holds, and more
def test_any_number_of_attributes_is_served(edge_dim, kernel_device):
    problem = make_problem(GRAPHS["many_to_few"], 2, 8, edge_dim, "raw", torch.float32)
    assert_accurate(attend(problem, structure(GRAPHS["many_to_few"], kernel_device), "triton"), problem, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_offset_in_all_logits_moves_lse_and_nothing_else(dtype, kernel_device):
    problem, graph = make_problem(GRAPHS["hub"], 2, 4, 3, "none", dtype), structure(GRAPHS["hub"], kernel_device)
    problem.scale = 1.0
    problem.query[..., 0] = 1.0
    problem.key[..., 0] = 0.0
    base = attend(problem, graph, "triton")
    problem.key[..., 0] = 1024.0
    moved = attend(problem, graph, "triton")
    finite = torch.isfinite(base["lse"])
    rounding = 1024.0 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(moved["lse"][finite], base["lse"][finite] + 1024.0, rtol=0, atol=4 * rounding)
    for name in ("out", "dvalue"):  # p moves by the rounding of the logits
        size = base[name].abs().max().item()
        atol = 16 * size * (rounding + torch.finfo(dtype).eps)
        torch.testing.assert_close(moved[name], base[name], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharp_softmax_is_as_accurate_as_plain_pytorch(dtype, kernel_device):
    problem = make_problem(GRAPHS["many_to_few"], 2, 8, 3, "raw", dtype)
    problem.query *= 30.0
    assert_accurate(attend(problem, structure(GRAPHS["many_to_few"], kernel_device), "triton"), problem, dtype)


def test_nan_in_a_key_reaches_the_destinations_that_read_it_and_no_other(kernel_device):
    problem, graph = make_problem(GRAPHS["shuffled"], 3, 4, 5), structure(GRAPHS["shuffled"], kernel_device)
    problem.key[2, 1, 3] = torch.nan
    out = attend(problem, graph, "triton")["out"]
    reads = torch.zeros(graph.num_dst, dtype=torch.bool)
    reads[problem.edge_index[1, problem.edge_index[0] == 2]] = True
    assert torch.equal(out.isnan().any(-1), torch.stack([torch.zeros_like(reads), reads, torch.zeros_like(reads)], 1))
