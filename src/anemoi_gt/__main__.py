"""The command line of the package, `python -m anemoi_gt`: what is installed and would run, and the applications by name."""

import argparse
import sys
from importlib import import_module

from anemoi_gt.version import __version__

APPLICATIONS = {  # by the name that `python -m anemoi_gt.NAME` takes too
    "train": "train a model, or continue a run",
    "evaluate": "score a trained model, and roll its forecasts out",
    "export": "make a package of a trained model that runs without this library",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Parameters
    ----------
    arguments : list of str, optional
        None are those of the command line. What follows the name of an application is its own.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in APPLICATIONS:
        name, *rest = arguments
        sys.argv = [f"anemoi_gt.{name}", *rest]  # where Hydra reads it
        import_module("anemoi_gt.export.__main__" if name == "export" else f"anemoi_gt.{name}").main()
        return
    parser = argparse.ArgumentParser(
        prog="python -m anemoi_gt",
        epilog="train, evaluate and export are Hydra applications: add --help to see theirs.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="print versions, devices, and for each attention backend whether it would run here"
    )
    for name, summary in APPLICATIONS.items():
        commands.add_parser(name, help=summary)
    parser.parse_args(arguments)

    from anemoi_gt.info import describe

    print(describe())


if __name__ == "__main__":
    main()
