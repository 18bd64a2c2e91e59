"""README, changelog and documentation as text: pages, their code blocks, and the commands in them."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "pycon", "shell", "yaml", "text"}
# the first line of a block that is a file, for a command to run
FILE = re.compile(r"# (\w+\.py)\n")
PROGRAMS = ("make", "pip", "python", "torchrun", "anemoi-gt")


def name_of(page):
    """Return the page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page, *languages):
    """Return the code of the page's blocks in some languages, in order."""
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind in languages]


def pages_with(*languages):
    """Parametrise a test over the pages that have such blocks."""
    chosen = [page for page in PAGES if any(blocks(page, language) for language in languages)]
    assert chosen
    cases = [pytest.param(page, marks=pytest.mark.pages) for page in chosen]
    return pytest.mark.parametrize("page", cases, ids=name_of)


def commands(page):
    """Return the commands on a page as lists of words.

    These are all lines of `shell` blocks, and the lines of `text` blocks that begin with a program,
    with or without srun. A remark after two spaces and a final `&` are removed.
    """
    lines = "".join(blocks(page, "shell")).splitlines()
    for line in "".join(blocks(page, "text")).splitlines():
        command = re.split(r"\s{2,}| &$", line.removeprefix("srun "))[0]
        if command.startswith(tuple(f"{program} " for program in PROGRAMS)):
            lines.append(command)
    return [shlex.split(line, comments=True) for line in lines]
