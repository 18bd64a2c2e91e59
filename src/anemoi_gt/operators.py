"""Registration of our operators with PyTorch. The only place that talks to the dispatcher."""

from collections.abc import Callable

import torch

NAMESPACE = "anemoi_gt"


def define_operator(function: Callable) -> torch._ops.OpOverload:
    """Register `function` as `torch.ops.anemoi_gt.<its name>`, with a schema from its annotations, and return the operator.

    It must not mutate its arguments nor return them. `torch.library.custom_op` checks that at every call, which costs more
    than the launch of a kernel (0.7 ms a call with torch 2.11 on Python 3.12); here `opcheck` does, in the tests.
    """
    name = f"{NAMESPACE}::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default")(function)
    return getattr(torch.ops.anemoi_gt, function.__name__).default
