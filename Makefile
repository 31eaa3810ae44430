# Two commands for a newcomer: `make serve` and `make test`. Both set everything up in .venv.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8080
MODELS := models
MODEL  := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
BIN    := $(VENV)/bin
PACKAGES := gateway workers kernels shm topology
SOURCES := pyproject.toml CMakeLists.txt README.md $(shell find $(PACKAGES) \
             -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cmake' \
             -o -name '*.cu' -o -name '*.cuh' -o -name '*.js' -o -name '*.css' -o -name '*.html' \
             -o -name '*.svg' | sort)

.PHONY: serve test lint check vendor clean

serve: $(VENV)/.installed $(MODEL)
	@exec $(BIN)/voltapile serve -m $(MODEL) --port $(PORT)

test: $(VENV)/.installed-test $(MODEL)
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd / && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml $(PACKAGES:%=-p voltapile.%)

vendor:
	gateway/page/vendor/renew.sh

$(MODEL): | $(VENV)/.installed
	@$(BIN)/python -m voltapile.gateway.cli.demo $(MODELS)

$(BIN)/python:
	@$(PYTHON) .ci/check_machine.py
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@echo "Installing voltapile into $(VENV) (compiles a C++ module: one to three minutes) ..."
	@$(BIN)/python -m pip install --quiet .
	@touch $@

# The tools alone: '.[test]' would compile the package once more.
$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	@echo "Installing the tools of the tests into $(VENV) ..."
	@$(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*project['optional-dependencies']['test'], sep='\n')" > $(VENV)/test-tools.txt
	@$(BIN)/python -m pip install --quiet -r $(VENV)/test-tools.txt
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
