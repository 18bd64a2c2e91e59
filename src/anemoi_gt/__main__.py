"""Command line of the package, `anemoi-gt` or `python -m anemoi_gt`: info and applications."""

import argparse
import os
import sys
from importlib import import_module

from anemoi_gt.app.command_line import current_spelling, print_help
from anemoi_gt.toolchain import compile_cache_problem
from anemoi_gt.version import __version__

APPLICATIONS = {
    "train": "train a model, or continue a run",
    "evaluate": "score a trained model and its rollouts",
    "rollout": "write one forecast of many steps as NetCDF or zarr",
    "export": "export a trained model to a package that runs without this library",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command with `arguments`, by default from the command line."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if arguments[0] in APPLICATIONS:
        name, *rest = map(current_spelling, arguments)
        sys.argv = [f"anemoi_gt.{name}", *rest]  # read by Hydra
        names_checkpoint = any(argument.startswith("checkpoint=") for argument in rest)
        if not names_checkpoint and not {"--help", "-h"}.isdisjoint(rest):
            print_help(name)
            return
        try:
            application = import_module(f"anemoi_gt.app.{name}_command")
        except OSError as error:  # PyTorch makes the folder of its cache when it is imported
            sys.exit(f"anemoi_gt.{name}: {compile_cache_problem() or error}")
        application.main()
        return
    parser = argparse.ArgumentParser(
        prog="anemoi-gt",
        epilog="train, evaluate, rollout and export are Hydra applications: add --help to see "
        "their options.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = {
        "info": "list versions, devices, available attention backends, and what Anemoi's install "
        "replaces"
    }
    for name, summary in (info | APPLICATIONS).items():
        command = commands.add_parser(name, help=summary)
        if name == "info":
            meaning = (
                "list how Anemoi's install would compute the blocks of a model file, such as "
                "inference-last.ckpt"
            )
            command.add_argument("--checkpoint", metavar="FILE", help=meaning)
    options = parser.parse_args(arguments)

    from anemoi_gt.app.info import describe

    try:
        print(describe(options.checkpoint), flush=True)
    except BrokenPipeError:  # of `info | head`; Python flushes once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:  # of the checkpoint
        sys.exit(f"anemoi-gt info: {error}")


if __name__ == "__main__":
    main()
