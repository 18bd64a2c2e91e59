"""What edge attention answers to a second derivative, whichever backend."""


def refuse_second_derivative(ctx, *_):
    """Raise: the backward of edge attention has no backward."""
    raise RuntimeError(
        "edge_attention has a first derivative only, got a backward through its backward (create_graph=True); "
        "use plain PyTorch operations where a second derivative is needed"
    )
