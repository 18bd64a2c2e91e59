"""The accuracy criterion: errors against a float64 oracle, relative to plain PyTorch's in the same dtype.

Over a corpus the RMS error is at most 2x (forward) or 3x (gradients) that of plain PyTorch. In a
single case it is at most that plus 16 eps times the RMS of the same expression on absolute values.
"""

import torch

from support.oracle import magnitude, oracle, plain

FACTOR = {"out": 2.0, "lse": 2.0}
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
    """Assert that every tensor of `result` is as accurate as the criterion asks in a single case."""
    __tracebackhide__ = True
    assert_within(result, oracle(problem), plain(problem), magnitude(problem), dtype)


def assert_within(result, exact, baseline, size, dtype):
    """Assert the same with given exact values, plain PyTorch's values, and the size of the summands."""
    __tracebackhide__ = True
    assert set(result) == set(exact), f"results must be {sorted(exact)}, got {sorted(result)}"
    for name in exact:
        assert result[name].shape == exact[name].shape, f"{name}: shape {tuple(result[name].shape)}"
        error, lost = (
            _rms(_errors(result[name], exact[name])),
            _rms(_errors(baseline[name], exact[name])),
        )
        floor = FLOOR * torch.finfo(dtype).eps * _rms(size[name])
        allowed = FACTOR.get(name, GRADIENT_FACTOR) * lost + floor
        assert error <= allowed, (
            f"{name}: RMS error {error:.2e}, plain PyTorch {lost:.2e}, floor {floor:.2e}"
        )


class Corpus:
    """Squared errors of many cases, ours and plain PyTorch's, and squares of the exact values."""

    def __init__(self):
        self.ours, self.plain, self.exact = {}, {}, {}

    def add(self, result, problem):
        """Add one case."""
        self.add_errors(result, oracle(problem), plain(problem))

    def add_errors(self, result, exact, baseline):
        """Add one case with its exact values and plain PyTorch's."""
        for name in exact:
            for sums, tensor in ((self.ours, result[name]), (self.plain, baseline[name])):
                sums[name] = (
                    sums.get(name, 0.0)
                    + _errors(tensor, exact[name]).double().square().sum().item()
                )
            size = exact[name][torch.isfinite(exact[name])].square().sum().item()
            self.exact[name] = self.exact.get(name, 0.0) + size

    def add_corpus(self, other):
        """Add the cases of another corpus."""
        for mine, theirs in (
            (self.ours, other.ours),
            (self.plain, other.plain),
            (self.exact, other.exact),
        ):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value

    def relative_error(self, name):
        """RMS error over RMS value."""
        return (self.ours[name] / self.exact[name]) ** 0.5

    def over_plain(self, name):
        """RMS error over that of plain PyTorch."""
        return (self.ours[name] / max(self.plain[name], 1e-300)) ** 0.5

    def assert_accurate(self):
        """Assert the criterion over all cases."""
        __tracebackhide__ = True
        for name in self.ours:
            ratio = self.over_plain(name)
            limit = FACTOR.get(name, GRADIENT_FACTOR)
            assert ratio <= limit, (
                f"{name}: RMS error is {ratio:.2f} times that of plain PyTorch, allowed {limit}"
            )
