"""The command line of the package, `python -m anemoi_gt`: prints what is installed and what would run."""

import argparse


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Parameters
    ----------
    arguments : list of str, optional
        None are those of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m anemoi_gt", epilog="Applications: python -m anemoi_gt.train, python -m anemoi_gt.evaluate."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="print versions, devices, and for each attention backend whether it would run here"
    )
    parser.parse_args(arguments)

    from anemoi_gt.info import describe

    print(describe())


if __name__ == "__main__":
    main()
