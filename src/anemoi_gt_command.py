"""Console script `anemoi-gt`; Ctrl-C during imports ends it without a traceback."""

import signal
import sys


def main() -> None:
    """Run the command line of the package."""
    # An ignored SIGINT, as in a shell's background job, stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # as python -m does, because a `_target_` may be in the working directory
    sys.path.insert(0, "")
    from anemoi_gt.__main__ import main

    main()
