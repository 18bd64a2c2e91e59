"""Sphinx extension: convert plain-text docstrings to reStructuredText.

Indented blocks (formulas, tables) become literal blocks, `|` and `*` in prose are escaped,
references become paragraphs, and sections of module docstrings become rubrics; numpydoc handles
docstrings of functions and classes.
"""

import re

HEADING = re.compile(r"-{3,}")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
END_OF_REFERENCE = re.compile(r".*[\d)]\.")  # a wrapped line ends otherwise
PROSE_SECTIONS = ("Notes", "Warnings")


def mark_up(what: str, lines: list[str]) -> list[str]:
    """Return the docstring of a `what` ("module", "class", ...) as numpydoc reStructuredText."""
    marked, section = [], ""
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if HEADING.fullmatch(below):
            section = line
        if what == "module" and HEADING.fullmatch(below):
            marked.append(f".. rubric:: {line}")
        elif what == "module" and HEADING.fullmatch(line):
            marked.append("")
        elif section == "References":
            marked += [line, ""] if END_OF_REFERENCE.fullmatch(line) else [line]
        elif section and what != "module" and section not in PROSE_SECTIONS:
            marked.append(line)
        elif line.startswith(" ") and _stands_alone(lines, number):
            if not _is_inside_block(lines, number):
                _begin_literal_block(marked)
            marked.append(line)
        else:
            marked.append(_escape(line))
    return marked


def _stands_alone(lines: list[str], number: int) -> bool:
    """Return whether the indented block here follows a blank line below prose, not a list."""
    first = number
    while first > 0 and (lines[first - 1].startswith(" ") or not lines[first - 1]):
        first -= 1
    above = lines[first - 1] if first > 0 else ""
    has_blank = not lines[first]
    return has_blank and not above.startswith(("- ", "* ", ".. "))


def _is_inside_block(lines: list[str], number: int) -> bool:
    above = number - 1
    while above > 0 and not lines[above]:
        above -= 1
    return lines[above].startswith(" ")


def _begin_literal_block(marked: list[str]) -> None:
    """End the previous paragraph with the marker of a literal block."""
    while marked and not marked[-1]:
        marked.pop()
    if marked and marked[-1].endswith(":"):
        marked[-1] += ":"
        marked.append("")
    else:
        marked += ["", "::", ""]


def _escape(line: str) -> str:
    parts = CODE.split(line)
    return "".join(
        part if CODE.fullmatch(part) else re.sub(r"([|*])", r"\\\1", part) for part in parts
    )


def _process(app, what, name, thing, options, lines):
    lines[:] = mark_up(what, lines)


def setup(app):
    """Run before numpydoc, which has the default priority of 500."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
