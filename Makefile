# make quick  the inner loop: tests that compile nothing and start no process, in a minute
# make test   run the tests, except those of make nightly; ERA5_PATH=FILE adds those on real weather data
# make test-anemoi ERA5_PATH=FILE  train and forecast with Anemoi's own commands, and compile its models with its torch,
#   in .venv-anemoi (8 GB)
# make nightly  further cases of the tests, and what releases of others can break: all versions of anemoi-models and the newest,
#   the lower bounds of pyproject.toml, each tested torch, Triton's interpreter as it is
# make demo   train the example model on a sphere, on a CPU, and draw the forecast
# make bench  time attention beside PyG's, and anemoi-models' where it is installed, on what this machine has
# make tables  write the tables and plots of the pages from benchmarks/results
# make lint, make docs, make format
# Each command makes its environment by itself; PYTHON chooses the interpreter (3.11 to 3.13).

PYTHON ?= python3
ERA5_PATH ?=
CORES := $(shell nproc 2>/dev/null || echo 2)
# One more than cores: tests wait for processes that they start. With two more, all take longer.
WORKERS ?= $(shell echo $$(( $(CORES) + 1 )))

BIN := .venv/bin
INSTALL := bin/python -m pip install --quiet --disable-pip-version-check
# For environments that one command uses: a module is compiled when it is imported, and most never are.
INSTALL_ONCE := $(INSTALL) --no-compile
PIP := .venv/$(INSTALL) --constraint constraints.txt
INSTALLED := .venv/.installed
PYTEST := bin/python -m pytest --dist worksteal
ERA5 := $(if $(ERA5_PATH),--era5-path=$(ERA5_PATH))
# Containers switch it off, and every process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quick demo test test-anemoi nightly bench tables lint format docs clean
.PHONY: nightly-upstream nightly-interpreter nightly-lowest nightly-torch

quick: $(INSTALLED)-test
	OMP_NUM_THREADS=1 .venv/$(PYTEST) -n $(CORES) --durations 5 -m "not ($(COSTS) or nightly)"

# Markers of cost, which pyproject.toml describes.
COSTS := compiled or ranks or process or pages or upstream or application or interpreted

demo: $(INSTALLED)-train
	$(BIN)/anemoi-gt train

test: $(INSTALLED)-test
	OMP_NUM_THREADS=1 .venv/$(PYTEST) -n $(WORKERS) $(ERA5)

# Older releases of torch trace less than the pinned one, so compiled models are tested with the release that Anemoi requires, too;
# nightly-torch-2.10 runs the other tests of compiled code with it.
test-anemoi: .venv-anemoi/.installed
	OMP_NUM_THREADS=1 .venv-anemoi/$(PYTEST) -n $(WORKERS) $(ERA5) \
		tests/anemoi_application tests/integrations/anemoi/test_compiled.py

bench: $(INSTALLED)-graphs
	$(BIN)/python benchmarks/run.py --output outputs/bench.json
	$(BIN)/python benchmarks/report.py outputs/bench.json

tables: $(INSTALLED)-graphs
	$(BIN)/python benchmarks/report.py

lint: $(INSTALLED)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In an environment with nothing but the extra `docs`, which a lack in it would break.
docs: .venv-docs/.installed
	.venv-docs/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html

%/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and f"Python 3.11 to 3.13 is needed, {sys.executable} is {sys.version.split()[0]}; set PYTHON=")'
	$(PYTHON) -m venv $*

# torch comes first: its pinned build satisfies every range that the other packages name.
$(INSTALLED)-torch: constraints.txt | .venv/bin/python
	$(PIP) torch
	touch $@

$(INSTALLED)-%: pyproject.toml constraints.txt $(INSTALLED)-torch
	$(PIP) --editable '.[$*]'
	touch $@

# Anemoi's packages ask for torch below 2.11, and the tests run on a newer one: what they import of Anemoi comes without
# dependencies, which are in the extra `test`, and other versions lie in folders of their own.
ANEMOI := --no-deps anemoi-models anemoi-graphs anemoi-utils
$(INSTALLED)-test: pyproject.toml constraints.txt $(INSTALLED)-torch
	$(PIP) --editable '.[test]'
	$(PIP) $(ANEMOI)
	$(call install_versions,0.9.3 0.11.2 0.16.0 0.19.0)
	touch $@

install_versions = for version in $(1); do \
	.venv/$(INSTALL) --upgrade --no-deps --target .venv/anemoi-models/$$version anemoi-models==$$version || exit; done

# As users install: with dependencies, which choose torch 2.10. trimesh and datashader are imported by anemoi-graphs and
# anemoi-training, whose metadata do not name them. The interpreter of Triton 3.6 cannot run with numpy 2.4.
OLD_NUMPY := 'numpy<2.4'
.venv-anemoi/.installed: pyproject.toml | .venv-anemoi/bin/python
	.venv-anemoi/$(INSTALL_ONCE) --editable '.[anemoi-application]' pytest pytest-xdist $(OLD_NUMPY)
	touch $@

.venv-docs/.installed: pyproject.toml constraints.txt | .venv-docs/bin/python
	.venv-docs/$(INSTALL_ONCE) --constraint constraints.txt torch
	.venv-docs/$(INSTALL_ONCE) --constraint constraints.txt --editable '.[docs]'
	touch $@

nightly: nightly-upstream nightly-interpreter nightly-lowest nightly-torch

nightly-upstream: $(INSTALLED)-test
	$(call install_versions,0.10.0 0.12.0 0.12.1 0.13.1 0.14.1 0.15.1 0.17.0 0.18.0)
	.venv/$(INSTALL) --upgrade --no-deps --target .venv/anemoi-models/newest anemoi-models
	OMP_NUM_THREADS=1 .venv/$(PYTEST) -n $(CORES) -m nightly $(ERA5)

nightly-interpreter: $(INSTALLED)-test
	OMP_NUM_THREADS=1 .venv/$(PYTEST) -n $(CORES) tests/ops tests/kernels --plain-interpreter

# Environments without constraints: what their packages need is the newest. Pages and other versions of Anemoi are tested with the pinned torch.
WITHOUT_PAGES := -m "not (pages or upstream or nightly)"

# torch, torch-geometric and hydra of the lower bounds in pyproject.toml, which the second command keeps.
nightly-lowest: .venv-lowest/bin/python
	.venv-lowest/$(INSTALL_ONCE) uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[hydra]'
	.venv-lowest/$(INSTALL_ONCE) --editable '.[test]' $(OLD_NUMPY)
	.venv-lowest/$(INSTALL_ONCE) $(ANEMOI)
	OMP_NUM_THREADS=1 .venv-lowest/$(PYTEST) -n $(CORES) $(WITHOUT_PAGES)

# Tested releases besides the pinned and the lowest one (src/anemoi_gt/tested_versions.py).
nightly-torch: nightly-torch-2.10 nightly-torch-2.11 nightly-torch-2.15
nightly-torch-%: .venv-torch-%/bin/python
	.venv-torch-$*/$(INSTALL_ONCE) 'torch==$*.*' --editable '.[test]' $(OLD_NUMPY)
	.venv-torch-$*/$(INSTALL_ONCE) $(ANEMOI)
	OMP_NUM_THREADS=1 .venv-torch-$*/$(PYTEST) -n $(CORES) $(WITHOUT_PAGES)

.PRECIOUS: $(INSTALLED)-% %/bin/python

clean:
	rm -rf .venv .venv-* build dist docs/_build outputs src/*.egg-info
