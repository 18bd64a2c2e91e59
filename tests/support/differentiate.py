"""Outputs and gradients of a module by name, for a loss that weights every output element differently."""

import torch


def differentiate(module, inputs, call):
    """Return output "out" and gradients "d..." of parameters and inputs of `call(inputs)`.

    `inputs` maps names to tensors, which become leaves. A tuple of output tensors is concatenated.
    """
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    out = call(leaves)
    out = out if torch.is_tensor(out) else torch.cat([part.flatten() for part in out])
    wanted = {**dict(module.named_parameters()), **leaves}
    loss = (
        out
        * torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    ).sum()
    gradients = torch.autograd.grad(loss, wanted.values(), allow_unused=True)
    return {"out": out.detach()} | {
        f"d{name}": grad for name, grad in zip(wanted, gradients, strict=True)
    }


def draw(*shape):
    """Return normally distributed float64, the same for the same shape."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def randomise(module, seed=0):
    """Draw all parameters at random: initial zeros or identities would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return module
