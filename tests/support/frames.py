"""Calls with room on Python's stack."""


def call_in_one_chunk(function, **arguments):
    """Call a function from a frame so large that the frames of its callees fit in the same chunk of the stack.

    CPython 3.11 maps its stack in chunks of 16 kB, and unmaps a chunk as soon as it is empty. Where
    calls cross the end of a chunk thousands of times a second, as in `torch.compile`, this takes 8% of
    the time. The frame of this function takes 512 kB, so its chunk has 1 MB; callees have the rest.
    """
    return function(**arguments)


call_in_one_chunk.__code__ = call_in_one_chunk.__code__.replace(co_stacksize=2**16)
