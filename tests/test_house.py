"""Imports go one way, and the package needs only the dependencies that it states."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from support import upstream

import anemoi_gt
from anemoi_gt import tested_versions
from anemoi_gt.__main__ import APPLICATIONS

SOURCE = Path(anemoi_gt.__file__).parent
ROOT = SOURCE.parents[1]
MAY_IMPORT = {  # package or module: the others that it may import
    **{
        part: set()
        for part in ("version", "kernel_config", "extras", "refusal", "torch_compat", "toolchain")
    },
    "attention_config": {"kernel_config"},  # the former name of KernelConfig
    "kernels": {"toolchain"},
    "tested_versions": {"torch_compat"},
    "custom_ops": {"torch_compat"},
    "option_checks": set(),
    "graph": {"torch_compat", "kernels", "custom_ops"},  # grouping edges on a GPU
    "ops": {
        "kernel_config",
        "custom_ops",
        "graph",
        "kernels",
        "option_checks",
        "refusal",
        "tested_versions",
        "toolchain",
        "torch_compat",
    },
    "nn": {
        "kernel_config",
        "custom_ops",
        "graph",
        "ops",
        "option_checks",
        "refusal",
        "torch_compat",
    },
    "explanation": {"graph", "ops"},
    "data": {"extras", "option_checks"},
    "replay": set(),
    "integrations": {
        "kernel_config",
        "custom_ops",
        "distributed",
        "graph",
        "nn",
        "ops",
        "refusal",
        "replay",
        "torch_compat",
    },
    "distributed": {"kernel_config", "graph", "nn", "ops", "option_checks", "torch_compat"},
    "export": {"custom_ops", "graph", "nn", "ops", "option_checks"},
    "app": {
        "kernel_config",
        "data",
        "distributed",
        "explanation",
        "export",
        "extras",
        "integrations",
        "nn",
        "ops",
        "option_checks",
        "replay",
        "tested_versions",
        "toolchain",
        "version",
    },
    "train": {"__main__"},
    "__main__": {"app", "toolchain", "version"},
}
# package or module: the packages beyond the standard library that it may import at top level
FOREIGN = {
    **{part: set() for part in ("version", "kernel_config", "extras", "option_checks")},
    **{
        part: {"torch"}
        for part in ("torch_compat", "tested_versions", "custom_ops", "graph", "ops", "explanation")
    },
    "toolchain": set(),
    "distributed": {"torch", "filelock"},  # torch requires filelock and sympy
    "export": {"torch", "sympy"},
    "kernels": {"triton"},
    "nn": {"torch", "torch_geometric"},
    "replay": {"torch", "numpy"},
    # A callback and a runner are imported when they are used.
    "integrations": {"torch", "torch_geometric", "pytorch_lightning", "anemoi"},
}


def modules():
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path, *, top_level_only=False):
    """Yield the absolute names of a module's imports."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    here = part(path)
    read = {name.split(".")[1] for name in imports(path) if name.startswith("anemoi_gt.")}
    assert read <= MAY_IMPORT[here] | {here}


def test_the_library_does_not_import_the_application():
    library = [path for path in modules() if part(path) not in ("app", "__main__")]
    importers = [
        path for path in library if any(name.startswith("anemoi_gt.app") for name in imports(path))
    ]
    assert importers == []


BOUND = [path for path in modules() if part(path) in FOREIGN]


@pytest.mark.parametrize("path", BOUND, ids=lambda path: str(path.relative_to(SOURCE)))
def test_foreign_packages_stay_in_their_parts(path):
    foreign = {name.split(".")[0] for name in imports(path, top_level_only=True)} - {"anemoi_gt"}
    assert foreign - sys.stdlib_module_names <= FOREIGN[part(path)]


def run_without(blocked, code):
    """Run code in a process where importing any of `blocked` fails."""
    # None: as if not installed
    guard = f"import sys\nsys.modules.update(dict.fromkeys({sorted(blocked)!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", guard + code], capture_output=True, text=True, timeout=120
    )


OPTIONAL = {
    "hydra",
    "omegaconf",
    "matplotlib",
    "xarray",
    "cf_xarray",
    "eccodes",
    "scipy",
    "einops",
    "tqdm",
    "anemoi",
    "triton",
}


@pytest.mark.process
def test_modules_need_torch_geometric_only():
    code = (
        "import torch, anemoi_gt\nprint(anemoi_gt.GraphTransformerConv(4, 4, heads=2, edge_dim=3))"
    )
    result = run_without(OPTIONAL - {"tqdm"}, code)  # torch-geometric itself imports tqdm
    assert result.stdout.startswith("GraphTransformerConv("), result.stderr


HELP = [["--help"], ["--version"], *([name, "--help"] for name in ("info", *APPLICATIONS))]
ASK_FOR_HELP = f"""
from anemoi_gt.__main__ import main
for arguments in {HELP}:
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code
    print(end="\\f")
"""


def test_help_and_version_need_no_torch():
    result = run_without({"torch"}, ASK_FOR_HELP)
    assert result.returncode == 0, result.stderr
    texts = result.stdout.split("\f")
    assert len(texts) == len(HELP) + 1
    assert all(texts[:-1])


def test_no_module_or_package_name_occurs_twice():
    paths = [path for path in modules() if path.stem != "__main__"]
    names = [path.parent.name if path.name == "__init__.py" else path.stem for path in paths]
    assert sorted(name for name, count in Counter(names).items() if count > 1) == []


def test_every_public_name_exists_and_is_documented():
    for name in anemoi_gt.__all__:
        thing = getattr(anemoi_gt, name)
        assert name.startswith("__") or (thing.__doc__ and len(thing.__doc__) > 40), name


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text())) or path.name == "version.py"


TRACED = ("graph", "ops", "nn", "integrations")  # rooms whose code torch.compile traces


def test_traced_code_asks_for_instances_of_tuples_of_classes():
    """PyTorch 2.9 cannot trace `isinstance(x, A | B)`; only `make nightly` compiles with it."""
    unions = []
    for path in (path for room in TRACED for path in (SOURCE / room).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != "isinstance":
                continue
            if any(isinstance(part, ast.BinOp) for part in ast.walk(call.args[1])):
                unions.append(f"{path.relative_to(SOURCE)}:{call.lineno}")
    assert unions == []


def test_unknown_attribute_of_the_package_raises():
    with pytest.raises(AttributeError, match="has no attribute 'GraphTransformer'"):
        _ = anemoi_gt.GraphTransformer


EXAMPLES = [path for path in modules() if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_docstring_examples_run(path):
    name = ".".join(("anemoi_gt", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    public = {name: getattr(anemoi_gt, name) for name in anemoi_gt.__all__}
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, **public})
    assert result.attempted > 0
    assert result.failed == 0


def test_type_checkers_read_the_hints_of_an_installed_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (SOURCE / "py.typed").is_file()
    assert project["tool"]["setuptools"]["package-data"]["anemoi_gt"] == ["py.typed"]


def test_a_wheel_has_every_package():
    # An editable install, and metadata of an earlier build, hide one that is missing.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("*.py")}
    packages = {".".join(folder.parts) for folder in folders} | {"anemoi_gt.configs"}
    assert packages == set(project["tool"]["setuptools"]["packages"])


def test_the_citation_and_the_newest_heading_of_the_changelog_have_the_version_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    unreleased, newest, *_ = headings
    assert unreleased == "[Unreleased]"
    assert newest == f"[{citation['version']}] - {citation['date-released']}"
    assert citation["version"] == anemoi_gt.__version__


def test_constraints_pin_every_package_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    del extras["anemoi-application"]  # which has Anemoi's own torch
    requirements = sum(extras.values(), project["dependencies"])
    names = {canonical_name(re.match(r"[\w.-]+", line)[0]) for line in requirements}
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names - set(map(canonical_name, pinned)) == {"anemoi-gt"}


def canonical_name(package):
    return re.sub(r"[-_.]+", "-", package).lower()


def test_the_tested_releases_of_torch_are_those_of_the_makefile():
    # the lowest one is that of pyproject.toml, the pinned one that of constraints.txt
    makefile = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(r"^nightly-torch: (.*)$", makefile, re.MULTILINE)
    releases = {target.removeprefix("nightly-torch-") for target in listed.split()}
    releases |= set(re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    releases |= set(
        re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert releases == {torch_release for torch_release, _ in tested_versions.TESTED}


def test_the_workflow_of_each_night_runs_every_part_of_make_nightly():
    makefile = (ROOT / "Makefile").read_text()
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    parts = set()
    for target in ("nightly", "nightly-torch"):
        (listed,) = re.findall(rf"^{target}: (.*)$", makefile, re.MULTILINE)
        parts |= set(listed.split())
    (matrix,) = re.findall(r"target: \[(.*)\]", workflow)
    # a job has no room for two releases of torch
    assert parts - {"nightly-torch"} == set(matrix.split(", ")) - {"test-anemoi"}


def test_the_versions_of_anemoi_models_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    gate, nightly = re.findall(r"call install_versions,([\d. ]+)", makefile)
    assert tuple(gate.split()) == (*upstream.OLD, upstream.PINNED)
    assert tuple(nightly.split()) == upstream.OTHERS
