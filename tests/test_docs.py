"""The documentation: its code runs, its links lead somewhere, and it names whatever is public."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pydoc
import re
import textwrap
from functools import cache
from pkgutil import iter_modules

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from support.pages import BLOCK, FILE, LANGUAGES, PAGES, ROOT, blocks, name_of, pages_with
from test_house import MAY_IMPORT

import anemoi_gt
import anemoi_gt.data
import anemoi_gt.distributed
import anemoi_gt.export
import anemoi_gt.integrations.anemoi
import anemoi_gt.integrations.pyg
import anemoi_gt.nn
import anemoi_gt.training

MARKDOWN_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HTML_LINK = re.compile(r'(?:src|href|srcset)="([^"]+)"')
EXTERNAL = {  # every link to elsewhere, so that a new one is looked at; nothing here reaches the network
    "https://anemoi.readthedocs.io/projects/models",
    "https://docs.pytorch.org/docs/stable/distributed.html",
    "https://github.com/pytorch/pytorch/issues/181555",
    "https://keepachangelog.com/en/1.1.0/",
    "https://semver.org/spec/v2.0.0.html",
}
RUNNER = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)  # messages may be broken into lines
BUILT = {"__init__", "__post_init__"}  # of a class, described by it
DOI, ARXIV = re.compile(r"doi:\s*(\S+)"), re.compile(r"arXiv:\s*(\S+)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    opening = [fence for fence in fences[::2] if not fence.startswith("{")]
    assert set(opening) <= LANGUAGES and not any(fences[1::2])


@pages_with("python", "pycon")
def test_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch, anemoi_as_it_is):
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # what a test has compiled here before is none of the page's
    namespace = {"__name__": "__main__"}
    for kind, code in BLOCK.findall(page.read_text()):
        if kind == "python" and not FILE.match(code):  # a file is run by a command: test_commands.py
            exec(compile(code, name_of(page), "exec"), namespace)
        elif kind == "pycon":
            test = doctest.DocTestParser().get_doctest(code, namespace, name_of(page), str(page), 0)
            assert RUNNER.run(test, clear_globs=False).failed == 0
            namespace |= test.globs


@pages_with("yaml")
def test_yaml_composes_as_the_config_of_an_application(page, tmp_path):
    for text in blocks(page, "yaml"):
        (tmp_path / "config.yaml").write_text(text)
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            config = compose("config")
        assert set(config) >= {re.split("[@:]", next(iter(entry)))[-1].split(".")[0] for entry in groups_of(text)}


def groups_of(text):
    """The entries of a defaults list that name a group."""
    return [
        {place.partition("@")[2] or place: choice}
        for entry in yaml.safe_load(text)["defaults"]
        if isinstance(entry, dict)
        for place, choice in entry.items()
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(page):
    prose = BLOCK.sub("", page.read_text())
    for link in MARKDOWN_LINK.findall(prose) + HTML_LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            assert link in EXTERNAL, link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and ROOT in target.parents, link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:anemoi_gt|benchmarks|configs|docs|tests)/(?!_build)[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "src" / name).exists()] == []


def test_links_to_elsewhere_have_the_form_of_an_address():
    text = "".join(page.read_text() for page in PAGES)
    assert all(re.fullmatch(r"https://[\w.-]+\.\w+/[\w./-]*", link) and link in text for link in EXTERNAL)


def test_identifiers_of_publications_have_their_form():
    sources = [*PAGES, *(ROOT / "src").rglob("*.py")]
    text = "\n".join(source.read_text() for source in sources)
    dois, preprints = DOI.findall(text), ARXIV.findall(text)
    assert dois and preprints
    assert all(re.fullmatch(r"10\.\d{4,}/[\w./()-]+\w", doi.rstrip(".,;)")) for doi in dois), dois
    assert all(re.fullmatch(r"\d{4}\.\d{4,5}", name.rstrip(".,;)")) for name in preprints), preprints


def anchors(page):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in PAGES:
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    pages = {page for page in PAGES if ROOT / "docs" in page.parents}
    assert listed == pages - {ROOT / "docs" / "index.md"}


@cache
def described():
    """Full names of what the API reference describes: by name, or as a member of a module that it describes whole."""
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    names = set(re.findall(r"\.\. auto(?:class|exception|function):: (\S+)", text))
    for module, options in re.findall(r"\.\. automodule:: (\S+)((?:\n   :.*)*)", text):
        names.add(module)
        chosen = re.search(r":members: (.*)", options)
        if chosen:
            names |= {f"{module}.{name.strip()}" for name in chosen[1].split(",")}
        elif ":no-members:" not in options:
            names |= {f"{module}.{name}" for name in definitions(importlib.import_module(module))}
    return names


def definitions(module):
    """Names of the documented public functions and classes that a module defines."""
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
        and thing.__doc__
    ]


def public():
    """Full names of what users are meant to use."""
    names = {f"anemoi_gt.{name}" for name in anemoi_gt.__all__ if not name.startswith("__")}
    names |= {f"anemoi_gt.nn.{name}" for name in anemoi_gt.nn.__all__ if name not in anemoi_gt.__all__}
    names |= {f"anemoi_gt.distributed.{name}" for name in anemoi_gt.distributed.__all__}
    names |= {f"anemoi_gt.training.{name}" for name in anemoi_gt.training.__all__}
    names |= {f"anemoi_gt.export.{name}" for name in anemoi_gt.export.__all__}
    names |= {f"anemoi_gt.integrations.anemoi.{name}" for name in anemoi_gt.integrations.anemoi.__all__}
    names |= {f"anemoi_gt.integrations.pyg.{name}" for name in definitions(anemoi_gt.integrations.pyg)}
    for part in iter_modules(anemoi_gt.data.__path__):
        module = importlib.import_module(f"anemoi_gt.data.{part.name}")
        names |= {f"{module.__name__}.{name}" for name in definitions(module)}
    return sorted(names)


@pytest.mark.parametrize("name", public())
def test_every_public_name_is_in_the_api_reference(name):
    assert name in described()


def functions(name):
    """The functions of a public name: itself, or what a class defines for its users, its constructor included.

    A method without a docstring answers to a base class of others, and is for nobody else.
    """
    thing = pydoc.locate(name)
    if inspect.isfunction(thing):
        return {name: thing}
    if not inspect.isclass(thing):
        return {}
    found = {member: getattr(function, "__func__", function) for member, function in vars(thing).items()}
    own = {member for member in found if not member.startswith("_")} | BUILT
    told = {member for member in own & set(found) if member in BUILT or found[member].__doc__}
    return {f"{name}.{member}": found[member] for member in told if has_source(found[member])}


def has_source(thing):
    """Whether something is a function that stands in a file, not one that a dataclass made."""
    return inspect.isfunction(thing) and not thing.__code__.co_filename.startswith("<")


@pytest.mark.parametrize("name", public())
def test_whatever_raises_says_what_it_raises(name):
    for place, function in functions(name).items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        described = pydoc.locate(name) if place.rpartition(".")[2] in BUILT else function
        if any(isinstance(node, ast.Raise) for node in ast.walk(tree)):
            assert re.search(r"\bRaises?\b", described.__doc__ or ""), (
                f"{place} raises, and its docstring is silent about it"
            )


def test_whatever_the_api_reference_names_is_there():
    assert [name for name in described() if pydoc.locate(name) is None] == []


@pytest.fixture(scope="module")
def config_tables():
    spec = importlib.util.spec_from_file_location("config_tables", ROOT / "docs" / "_ext" / "config_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_config_group_is_on_the_page(config_tables):
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert re.findall(r"^```\{config-group\} (.*)$", page, re.MULTILINE) == sorted(config_tables.groups())


def test_every_option_of_a_group_is_explained_with_its_value_in_every_choice(config_tables):
    for group in config_tables.groups():
        reference = config_tables.group_reference(group)
        for choice in config_tables.choices(group):
            assert f"`{group}={choice}`" in reference or f"`{choice}`" in reference
            values = config_tables.composed(group, choice) if "/" not in group else {}
            for option in (name for name in values if not name.startswith("_")):
                row = re.search(
                    rf"^\| `{option}` \|.*`{re.escape(spelled(values[option]))}`.*\| (.+) \|$", reference, re.MULTILINE
                )
                assert row and len(row[1]) > 3, f"{group}={choice}: {option}"


def spelled(value):
    """A value as YAML writes it."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def test_an_option_without_description_stops_the_build(config_tables, monkeypatch):
    monkeypatch.setattr(config_tables, "meanings", lambda target: {"heads": "Number of heads."})
    with pytest.raises(LookupError, match="does not list .*'channels'"):
        config_tables.group_reference("model")


def test_the_table_of_rooms_is_what_the_house_enforces():
    page = (ROOT / "docs" / "contributing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    table = {room: set() if rooms == "nothing" else set(rooms.split(", ")) for room, rooms in rows}
    assert table == {room: rooms for room, rooms in MAY_IMPORT.items() if room != "version"}


def test_changelog_keeps_the_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", version) for version in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_readme_holds_the_two_commands_and_says_what_is_missing():
    text = (ROOT / "README.md").read_text()
    first_screen = text[: text.index("## Swap in Anemoi")]
    assert "make demo" in first_screen and "make test" in first_screen and "Not there yet" in first_screen
