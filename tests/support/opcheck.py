"""What an operator registers with PyTorch, checked without compiling: tests of compiled calls compare numbers."""

import torch

REGISTRATION = ("test_schema", "test_autograd_registration", "test_faketensor")


def check_registration(operator, arguments):
    """Check schema, autograd and fake of an operator; its outputs must be written completely."""
    torch.library.opcheck(operator, arguments, test_utils=REGISTRATION)
