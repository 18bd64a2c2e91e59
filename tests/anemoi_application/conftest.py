"""One server for the workers of pytest-xdist, from which Anemoi's commands are forked."""

import pytest
from anemoi_application import commands


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Start the server in the process that starts the workers, before these collect tests."""
    node.workerinput["server"] = commands.start_server()


def pytest_configure(config):
    """Let a worker use the server."""
    if hasattr(config, "workerinput"):
        commands.join_server(config.workerinput["server"])
