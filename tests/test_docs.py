"""The documentation: its code runs, its links resolve, and it covers the public API."""

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
import anemoi_gt.app.datasets
import anemoi_gt.app.training
import anemoi_gt.data
import anemoi_gt.distributed
import anemoi_gt.export
import anemoi_gt.nn
from anemoi_gt.integrations import anemoi, pyg
from anemoi_gt.ops.activations import ACTIVATIONS

MARKDOWN_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HTML_LINK = re.compile(r'(?:src|href|srcset)="([^"]+)"')
EXTERNAL = {  # every external link, so that new ones are reviewed; not accessed here
    "https://anemoi.readthedocs.io/projects/models",
    "https://cds.climate.copernicus.eu/datasets/reanalysis-era5-single-levels",
    "https://docs.pytorch.org/docs/stable/distributed.html",
    "https://github.com/ecmwf/anemoi-core",
    "https://github.com/ecmwf/anemoi-core/issues/1403",
    "https://github.com/ecmwf/anemoi-core/issues/1415",
    "https://github.com/pytorch/pytorch/issues/181555",
    "https://keepachangelog.com/en/1.1.0/",
    "https://pytorch.org/get-started/locally/",
    "https://semver.org/spec/v2.0.0.html",
}
RUNNER = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)  # messages may be wrapped
BUILT = {"__init__", "__post_init__"}  # documented by their class
DOI = re.compile(r"doi:\s*(\S+)")
ARXIV = re.compile(r"arXiv:\s*(\S+)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_code_block_names_its_language(page):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    opening = [fence for fence in fences[::2] if not fence.startswith("{")]
    assert set(opening) <= LANGUAGES
    assert not any(fences[1::2])


@pages_with("python", "pycon")
def test_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch, anemoi_as_it_is):
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # what earlier tests compiled must not count for the page
    namespace = {"__name__": "__main__"}
    for kind, code in BLOCK.findall(page.read_text()):
        if kind == "python" and not FILE.match(code):  # test_commands.py runs files
            exec(compile(code, name_of(page), "exec"), namespace)
        elif kind == "pycon":
            test = doctest.DocTestParser().get_doctest(code, namespace, name_of(page), str(page), 0)
            assert RUNNER.run(test, clear_globs=False).failed == 0
            namespace |= test.globs


@pages_with("python", "pycon")
def test_code_does_not_hide_the_package_anemoi_of_ecmwf(page):
    for _, code in BLOCK.findall(page.read_text()):
        assert not re.search(r"import anemoi$|as anemoi$", code, re.MULTILINE)


@pages_with("yaml")
def test_yaml_composes_as_the_config_of_an_application(page, tmp_path):
    for text in blocks(page, "yaml"):
        (tmp_path / "config.yaml").write_text(text)
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            config = compose("config")
        assert set(config) >= {
            re.split("[@:]", group)[-1].split(".")[0] for group in groups_of(text)
        }


def groups_of(text):
    groups = []
    for entry in yaml.safe_load(text)["defaults"]:
        if isinstance(entry, dict):
            for group in entry:
                groups.append(group.partition("@")[2] or group)
    return groups


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    prose = BLOCK.sub("", text)
    for link in MARKDOWN_LINK.findall(prose) + HTML_LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            assert link in EXTERNAL or link.startswith("https://img.shields.io/badge/"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert ROOT in target.parents, link
        assert not anchor or anchor in anchors(target), link
    named = re.findall(r"`((?:anemoi_gt|benchmarks|configs|docs|tests)/(?!_build)[\w./-]+)`", text)
    assert [
        name for name in named if not (ROOT / name).exists() and not (ROOT / "src" / name).exists()
    ] == []


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_addresses_and_identifiers_of_publications_are_well_formed():
    pages = "\n".join(page.read_text() for page in PAGES)
    assert all(
        re.fullmatch(r"https://[\w.-]+\.\w+/[\w./-]*", link) and link in pages for link in EXTERNAL
    )
    text = pages + "\n".join(source.read_text() for source in (ROOT / "src").rglob("*.py"))
    dois, preprints = DOI.findall(text), ARXIV.findall(text)
    assert dois
    assert preprints
    assert all(re.fullmatch(r"10\.\d{4,}/[\w./()-]+\w", doi.rstrip(".,;)")) for doi in dois), dois
    assert all(re.fullmatch(r"\d{4}\.\d{4,5}", name.rstrip(".,;)")) for name in preprints), (
        preprints
    )


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in PAGES:
        for tree in re.findall(
            r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    pages = {page for page in PAGES if ROOT / "docs" in page.parents}
    assert listed == pages - {ROOT / "docs" / "index.md"}


@cache
def described():
    """Return the full names in the API reference: by name, or as a member of a documented module."""
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    names = set(re.findall(r"\.\. auto(?:class|exception|function):: (\S+)", text))
    for module, options in re.findall(r"\.\. automodule:: (\S+)((?:\n   :.*)*)", text):
        names.add(module)
        members = re.search(r":members: (.*)", options)
        if members:
            names |= {f"{module}.{name.strip()}" for name in members[1].split(",")}
        elif ":no-members:" not in options:
            names |= {f"{module}.{name}" for name in definitions(importlib.import_module(module))}
    return names


def definitions(module):
    """Return the names of the documented public functions and classes that a module defines."""
    documented = {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and thing.__doc__
    }
    things = {
        name: thing
        for name, thing in documented.items()
        if inspect.isfunction(thing) or inspect.isclass(thing)
    }
    return [name for name, thing in things.items() if thing.__module__ == module.__name__]


def public():
    """Return the full names of the public API."""
    packages = (
        anemoi_gt.nn,
        anemoi_gt.distributed,
        anemoi_gt.app.training,
        anemoi_gt.export,
        anemoi,
        pyg,
    )
    names = {f"anemoi_gt.{name}" for name in anemoi_gt.__all__ if not name.startswith("__")}
    names |= {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    for package in (anemoi_gt.nn, anemoi):  # described by their shorter names
        names -= {f"{package.__name__}.{name}" for name in anemoi_gt.__all__}
    folders = (anemoi_gt.data, anemoi_gt.app.datasets)
    parts = [
        f"{folder.__name__}.{part.name}"
        for folder in folders
        for part in iter_modules(folder.__path__)
    ]
    modules = [importlib.import_module(name) for name in parts]
    names |= {f"{module.__name__}.{name}" for module in modules for name in definitions(module)}
    return sorted(names)


@pytest.mark.parametrize("name", public())
def test_every_public_name_is_in_the_api_reference(name):
    assert name in described()


def test_every_name_in_the_api_reference_exists():
    assert [name for name in described() if pydoc.locate(name) is None] == []


def functions(name):
    """Return a public function, or the constructor and documented public methods of a class, by name."""
    thing = pydoc.locate(name)
    if inspect.isfunction(thing):
        return {name: thing}
    if not inspect.isclass(thing):
        return {}
    methods = {}
    for member, value in vars(thing).items():
        function = getattr(value, "__func__", value)
        is_documented = function.__doc__ and not member.startswith("_")
        if (is_documented or member in BUILT) and in_file(function):
            methods[f"{name}.{member}"] = function
    return methods


def in_file(thing):
    """Return whether something is a function in a source file, not generated by a dataclass or a protocol."""
    return (
        inspect.isfunction(thing)
        and thing.__module__ != "typing"
        and not thing.__code__.co_filename.startswith("<")
    )


@pytest.mark.parametrize("name", public())
def test_docstring_of_a_function_that_raises_has_a_raises_section(name):
    for full_name, function in functions(name).items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        owner = pydoc.locate(name) if full_name.rpartition(".")[2] in BUILT else function
        if any(isinstance(node, ast.Raise) for node in ast.walk(tree)):
            assert re.search(r"\bRaises?\b", owner.__doc__ or ""), full_name


@pytest.fixture(scope="module")
def config_tables():
    spec = importlib.util.spec_from_file_location(
        "config_tables", ROOT / "docs" / "_ext" / "config_tables.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_config_group_is_on_the_page(config_tables):
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert re.findall(r"^```\{config-group\} (.*)$", page, re.MULTILINE) == sorted(
        config_tables.groups()
    )


@pytest.mark.pages
def test_every_parameter_of_a_group_is_documented_with_its_value_in_every_option(config_tables):
    for group in config_tables.groups():
        reference = config_tables.group_reference(group)
        for choice in config_tables.choices(group):
            assert f"`{group}={choice}`" in reference or f"`{choice}`" in reference
            values = config_tables.composed(group, choice) if "/" not in group else {}
            options = list(values.items())
            for value in values.values():
                if isinstance(value, dict) and "_target_" in value:  # of an object
                    options += value.items()
            for option, value in options:
                if option.startswith("_"):
                    continue
                value = re.escape(as_yaml(value))
                row = re.search(
                    rf"^\| `{option}` \|.*`{value}`.*\| (.+) \|$", reference, re.MULTILINE
                )
                assert row, f"{group}={choice}: {option}"
                assert len(row[1]) > 3, f"{group}={choice}: {option}"


def as_yaml(value):
    if isinstance(value, dict) and "_target_" in value:
        return value["_target_"].rpartition(".")[2]
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def test_parameter_without_description_raises(config_tables, monkeypatch):
    monkeypatch.setattr(config_tables, "meanings", lambda target: {"heads": "Number of heads."})
    with pytest.raises(LookupError, match="does not list .*'channels'"):
        config_tables.group_reference("model")


def test_import_table_of_the_contributing_page_is_the_enforced_one():
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]+) \|$",
        (ROOT / "docs" / "contributing.md").read_text(),
        re.MULTILINE,
    )
    table = {
        part: set() if imports == "nothing" else set(imports.split(", ")) for part, imports in rows
    }
    assert table == {part: imports for part, imports in MAY_IMPORT.items() if part != "version"}


def test_the_mathematics_lists_every_activation():
    text = (ROOT / "docs" / "mathematics.md").read_text()
    table = text.partition("| `f` | `f(h)` | `f'(h)` |\n")[2].partition("\n\n")[0]
    listed = [row.split("|")[1].split(",")[0].strip().lower() for row in table.splitlines()[1:]]
    kinds = [activation.kind.__name__.lower() for activation in ACTIVATIONS.values()]
    assert sorted(listed) == sorted(kinds)


def test_changelog_has_the_format_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert versions[1].startswith(f"[{anemoi_gt.__version__}] - ")
    assert all(
        re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", version) for version in versions[1:]
    )
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_readme_starts_with_installation_the_commands_and_the_limitations():
    first_screen, *_ = (ROOT / "README.md").read_text().split("## Speed")
    for text in (
        "pip install",
        "make demo",
        "make test",
        "anemoi_gt.install()",
        "swap_layers(model)",
        "git clone",
        "anemoi-gt train data=xarray data.path=FILE",
        "Not yet measured",
    ):
        assert text in first_screen


WORDS = {  # headings of the glossary, as prose has them
    "launch-bound": "launch-bound",
    "eager": "eager",
    "replayed": r"replay(?:ed|s)?",
    "fused": "fused?",
    "checkpointing": "(?:activation )?checkpointing",
    "mapper": "mappers?",
    "chunk": "chunks?",
    "rank": "ranks?",
    "shard": r"shard(?:s|ed)?",
    "autocast": "autocast",
}
FOR_DEVELOPERS = {"contributing", "design", "mathematics", "explain", "changelog", "glossary"}
FOR_USERS = [ROOT / "README.md"] + [
    page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in FOR_DEVELOPERS
]
NOT_PROSE = re.compile(
    r"^```.*?^```$|^:::.*?^:::$|<!-- table.*?<!-- end of [\w-]+ -->|^[|#].*?$|^ {4}.*?$|`[^`\n]*`",
    re.MULTILINE | re.DOTALL,
)


def test_the_glossary_has_these_words():
    page = (ROOT / "docs" / "glossary.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == list(WORDS)


@pytest.mark.parametrize("page", FOR_USERS, ids=name_of)
def test_words_of_the_glossary_are_linked_where_they_first_stand_in_prose(page):
    prose = NOT_PROSE.sub("", page.read_text())
    linked = r"\[([^\]]*)\]\((?:docs/)?glossary\.md#([\w-]+)\)"
    other_link = r"!?\[[^\]]*\]\((?!(?:docs/)?glossary)[^)]*\)"
    prose = re.sub(linked, r"LINKED-\2 ", re.sub(other_link, "", prose))
    for word, form in WORDS.items():
        first = re.search(rf"LINKED-{word} |(?<![\w-]){form}(?![\w-])", prose, re.IGNORECASE)
        assert first is None or first[0].startswith("LINKED"), word
