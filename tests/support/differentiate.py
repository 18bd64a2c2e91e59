"""Outputs and gradients of a module by name, for a loss that weights every output element differently."""

import torch


def differentiate(module, inputs, call):
    """Return output "out" and gradients "d..." of parameters and inputs of `call(inputs)`.

    `inputs` maps names to tensors, which become leaves. A tuple of output tensors is concatenated.
    """
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    out = call(leaves)
    if not torch.is_tensor(out):
        out = torch.cat([part.flatten() for part in out])
    leaves = {**dict(module.named_parameters()), **leaves}
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.reshape(out.shape)).sum()
    gradients = torch.autograd.grad(loss, leaves.values(), allow_unused=True)
    result = {"out": out.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        result[f"d{name}"] = gradient
    return result


def draw(*shape):
    """Return a normally distributed float64 tensor, the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def randomise(module, seed=0):
    """Draw all parameters at random: initial zeros or identities would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return module
