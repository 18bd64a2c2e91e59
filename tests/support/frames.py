"""Frames of Python functions in one piece of memory."""


def call_in_one_chunk(function, **arguments):
    """Call a function such that the frames below it need no further chunk of the interpreter's stack.

    CPython takes this stack from the system in chunks of 16 kB, and gives a chunk back as soon as it
    is empty: where calls go up and down across the end of one, thousands of times a second, as in
    `torch.compile`, that takes 8% of the time. A chunk that is made for a larger frame is
    larger: for the half MB of this one, 1 MB, of which the other half is for the frames below.
    """
    return function(**arguments)


call_in_one_chunk.__code__ = call_in_one_chunk.__code__.replace(co_stacksize=2**16)
