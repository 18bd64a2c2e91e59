# make demo   train the example model on a sphere, on a CPU, and draw the forecast
# make test   run every test; ERA5_PATH=FILE adds those on real weather data
# make test-anemoi ERA5_PATH=FILE  train and forecast with Anemoi's own commands, and test compiled code with Anemoi's torch,
#   in .venv-anemoi (8 GB)
# make bench  time attention beside PyG's, and anemoi-models' where it is installed, on what this machine has
# make lint, make docs, make format
# Each command makes .venv by itself; PYTHON chooses the interpreter (3.11 to 3.13).

PYTHON ?= python3
ERA5_PATH ?=
# One more than cores: tests wait for processes that they start.
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 1 )))

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := .venv/.installed
FOLDER := $(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .venv/anemoi-models

.PHONY: demo test test-anemoi bench lint format docs clean

demo: $(INSTALLED)-train
	$(BIN)/anemoi-gt train

test: $(INSTALLED)-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(ERA5_PATH),--era5-path=$(ERA5_PATH))

# Older releases of torch trace less than the pinned one, so compiled code is tested with the release that Anemoi requires, too.
test-anemoi: .venv-anemoi/.installed
	.venv-anemoi/bin/python -m pytest tests/anemoi_application $(if $(ERA5_PATH),--era5-path=$(ERA5_PATH))
	.venv-anemoi/bin/python -m pytest tests/integrations/anemoi tests/nn -k "compiled or traced" --ignore tests/integrations/anemoi/test_versions.py

bench: $(INSTALLED)-graphs
	$(BIN)/python benchmarks/run.py --output outputs/bench.json
	$(BIN)/python benchmarks/report.py outputs/bench.json

lint: $(INSTALLED)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and f"Python 3.11 to 3.13 is needed, {sys.executable} is {sys.version.split()[0]}; set PYTHON=")'
	$(PYTHON) -m venv .venv

# torch comes first: its pinned build satisfies every range that the other packages name.
$(INSTALLED)-torch: constraints.txt | .venv/bin/python
	$(PIP) torch
	touch $@

$(INSTALLED)-%: pyproject.toml constraints.txt $(INSTALLED)-torch
	$(PIP) --editable '.[$*]'
	touch $@

# Anemoi's packages ask for torch below 2.11, and the tests run on a newer one: what they import of Anemoi comes without
# dependencies, which are in the extra `test`, and old versions and the newest one lie in folders of their own.
VERSIONS := 0.9.3 0.10.0 0.11.2 0.12.0 0.12.1 0.13.1 0.14.1 0.15.1 0.16.0 0.17.0 0.18.0 0.19.0
$(INSTALLED)-test: pyproject.toml constraints.txt $(INSTALLED)-torch
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps anemoi-models anemoi-graphs anemoi-utils
	for version in $(VERSIONS); do $(FOLDER)/$$version anemoi-models==$$version || exit; done
	$(FOLDER)/newest anemoi-models
	touch $@

# As users install: with dependencies, which choose torch 2.10. trimesh and datashader are imported by anemoi-graphs and
# anemoi-training, whose metadata do not name them. The interpreter of Triton 3.6 cannot run with numpy 2.4.
.venv-anemoi/.installed: pyproject.toml | .venv/bin/python
	.venv/bin/python -m venv .venv-anemoi
	.venv-anemoi/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[anemoi-application]' pytest 'numpy<2.4'
	touch $@

.PRECIOUS: $(INSTALLED)-%

clean:
	rm -rf .venv .venv-anemoi build dist docs/_build outputs src/*.egg-info
