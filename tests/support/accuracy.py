"""The accuracy criterion: errors against a float64 oracle, relative to the errors of plain PyTorch in the same dtype.

Over a corpus, the RMS error may be at most 2x (forward) or 3x (gradients) the RMS error of plain
PyTorch. For a single case, the limit is higher by 16 eps times the RMS of the same expression on
absolute values.
"""

import torch

from support.oracle import magnitude, oracle, plain

FACTOR = dict.fromkeys(("out", "lse", "edges", "sums"), 2.0)
GRADIENT_FACTOR = 3.0
FLOOR = 16


def _rms(tensor):
    return tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0


def _errors(result, exact):
    finite = torch.isfinite(exact)
    message = "lse must be -inf exactly where there is no in-edge"
    assert torch.equal(torch.isneginf(result), torch.isneginf(exact)), message
    return (result.double() - exact)[finite]


def assert_accurate(result, problem, dtype):
    """Assert that every tensor of `result` meets the criterion for a single case."""
    __tracebackhide__ = True
    assert_within(result, oracle(problem), plain(problem), magnitude(problem), dtype)


def assert_within(result, exact, baseline, size, dtype):
    """Assert the same, given the exact values, the values of plain PyTorch, and the size of the summands."""
    __tracebackhide__ = True
    assert set(result) == set(exact), f"results must be {sorted(exact)}, got {sorted(result)}"
    for name in exact:
        assert result[name].shape == exact[name].shape, f"{name}: shape {tuple(result[name].shape)}"
        error = _rms(_errors(result[name], exact[name]))
        baseline_error = _rms(_errors(baseline[name], exact[name]))
        floor = FLOOR * torch.finfo(dtype).eps * _rms(size[name])
        allowed = FACTOR.get(name, GRADIENT_FACTOR) * baseline_error + floor
        assert error <= allowed, (
            f"{name}: RMS error {error:.2e}, plain PyTorch {baseline_error:.2e}, floor {floor:.2e}"
        )


def _sum_of_squares(tensor):
    return tensor.double().square().sum().item()


def _add(sums, name, value):
    sums[name] = sums.get(name, 0.0) + value


class Corpus:
    """Sums over many cases: squared errors of anemoi_gt and of plain PyTorch."""

    def __init__(self):
        self.ours = {}
        self.plain = {}

    def add(self, result, problem):
        """Add one case."""
        self.add_errors(result, oracle(problem), plain(problem))

    def add_errors(self, result, exact, baseline):
        """Add one case, given the exact values and the values of plain PyTorch."""
        for name in exact:
            _add(self.ours, name, _sum_of_squares(_errors(result[name], exact[name])))
            _add(self.plain, name, _sum_of_squares(_errors(baseline[name], exact[name])))

    def add_corpus(self, other):
        """Add the cases of another corpus."""
        for name in other.ours:
            _add(self.ours, name, other.ours[name])
            _add(self.plain, name, other.plain[name])

    def over_plain(self, name):
        """Return the RMS error relative to the RMS error of plain PyTorch."""
        return (self.ours[name] / max(self.plain[name], 1e-300)) ** 0.5

    def assert_accurate(self):
        """Assert the criterion over all cases."""
        __tracebackhide__ = True
        for name in self.ours:
            ratio = self.over_plain(name)
            limit = FACTOR.get(name, GRADIENT_FACTOR)
            assert ratio <= limit, (
                f"{name}: RMS error is {ratio:.2f}x the error of plain PyTorch, allowed {limit}x"
            )
