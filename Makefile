# One command a line of `make help`. TORCH_INDEX=URL takes torch from that index first (a CPU-only build, for instance).
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-extras fuzz lint lock bench flower-next chromium postgresql clean
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := .venv-extras
TORCH := torch==2.13.0
LOCK := requirements/linux-x86_64-py311.txt
TORCH_INDEX ?=
PYTEST_ARGS ?=
FLOWER_NEXT ?= flwr[simulation]
# pip shows its progress to a person, and prints nothing into a log.
QUIET := $(shell [ -t 2 ] || echo -q)
DEMO_ARGS ?=
FUZZ_ARGS ?=
FUZZ_SERVICE_ARGS ?=
BENCH_ARGS ?= --preset small --json

help:  ## this list
	@echo "make TARGET [TORCH_INDEX=URL]   (TORCH_INDEX: where pip takes $(TORCH) from, e.g. an index of CPU-only builds)"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 19

setup: $(VENV)/.ready  ## build .venv here with everything that `thinwire demo` needs
	@echo "$(VENV) is ready; next, in this shell: . $(BIN)/activate    (then: thinwire demo, or thinwire init mine)"

demo: $(VENV)/.ready  ## a live federated run of eight processes on this machine (DEMO_ARGS="--no-browser --json")
	@$(BIN)/thinwire demo $(DEMO_ARGS)

# Hundreds of processes import what is compiled once, and write what they must sync: in memory, if 2 GB of it are free.
test: $(VENV)/.dev chromium postgresql  ## run every test (PYTEST_ARGS="-x tests/cli")
	@free=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}'); \
	if [ -z "$${TMPDIR:-}" ] && [ "$${free:-0}" -gt 2000000 ]; then export TMPDIR=/dev/shm; fi; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-extras: $(EXTRAS)/.ready  ## with packages that users bring along: trackers, a notebook, Lightning, transformers (PYTEST_ARGS="-k mlflow")
	@$(EXTRAS)/bin/python -m pytest -q -p no:cacheprovider tests/extras $(PYTEST_ARGS)

# Then the service is restarted 100 times under hostile messages: FUZZ_SERVICE_ARGS="--restarts 6 --cases 100".
fuzz: $(VENV)/.dev  ## 100 000 hostile frames a decoder, kernels under sanitizers (FUZZ_ARGS="--frames 1000 --only rice")
	@tests/compression/sanitized.sh $(BIN)/python -m tests.compression.fuzz $(FUZZ_ARGS)
	@$(BIN)/python -m tests.system.attacks.fuzz_service $(FUZZ_SERVICE_ARGS)

lint: $(VENV)/.dev  ## ruff, mypy strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config pyproject.toml

bench: $(VENV)/.ready  ## every benchmark, small preset, one JSON document each (BENCH_ARGS="--preset full --json")
	@for file in benchmarks/[a-z]*.py benchmarks/[a-z]*/__main__.py; do \
	  grep -qE '(run_in_folder|arguments)\("' "$$file" && [ "$$file" != benchmarks/before_after.py ] || continue; name=$${file#benchmarks/}; name=$${name%.py}; name=$${name%/__main__}; \
	  echo "benchmarks.$$name" >&2; $(BIN)/python -m "benchmarks.$$name" $(BENCH_ARGS) || exit 1; done

# A release of flwr that is newer than the one in constraints.txt, with Ray, in a venv that finds all else in .venv. Ray
# starts many processes: on a busy machine (a load of 16 on 2 cores) its one test takes four minutes.
flower-next: $(VENV)/.dev  ## the tests of the Flower edge with the newest flwr, and in Flower's simulation on Ray
	@set -eu; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(BIN)/python -m venv "$$dir/venv"; "$$dir/venv/bin/python" -m pip install $(QUIET) '$(FLOWER_NEXT)'; \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$("$$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"; \
	"$$dir/venv/bin/python" -c 'import flwr; print("flwr", flwr.__version__)'; \
	PYTHONPATH=. "$$dir/venv/bin/python" -m pytest -q -n 0 -p no:cacheprovider -o faulthandler_timeout=900 tests/flower $(PYTEST_ARGS)

lock: $(VENV)/.dev  ## write the hashes of all that is installed for the tests
	@$(BIN)/python requirements/lock.py

clean:  ## remove .venv and caches
	@rm -rf $(VENV) $(EXTRAS) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The stamps make a second call instant; a change of what is installed makes them stale.
$(VENV)/.made:
	@set -eu; \
	found=; for python in python3.11 python3.12 python3.13 python3; do \
	  if "$$python" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	  then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "error: no Python 3.11, 3.12 or 3.13 was found" >&2; \
	  echo "why:   Thinwire needs one, as python3.11 or python3 on the PATH" >&2; \
	  echo "try:   apt-get install python3 python3-venv" >&2; exit 1; fi; \
	if [ ! -x $(BIN)/python ]; then \
	  "$$found" -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "error: $$found cannot make a virtual environment" >&2; \
	    echo "try:   apt-get install python3-venv" >&2; exit 1; }; fi; \
	touch $@

# Where the lock fits, all but torch is held to its hash before anything else can bring it; elsewhere the file is empty.
$(VENV)/.locked: $(VENV)/.made $(LOCK)
	@set -eu; : > $@.new; \
	if $(BIN)/python -c 'import platform as p, sys; raise SystemExit((p.system(), p.machine(), sys.version_info[:2]) != ("Linux", "x86_64", (3, 11)))'; \
	then $(BIN)/python -m pip install $(QUIET) --force-reinstall --require-hashes --no-deps -r $(LOCK); echo locked > $@.new; fi; \
	mv $@.new $@

$(VENV)/.ready: $(VENV)/.made pyproject.toml constraints.txt setup.py $(wildcard csrc/*)
	@set -eu; \
	echo "installing Thinwire and torch into $(VENV): 300 MB to load, 1.3 GB on the disk, one to five minutes" >&2; \
	isolated=; if [ -s $(VENV)/.locked ]; then isolated=--no-build-isolation; fi; \
	if [ -n "$(TORCH_INDEX)" ]; then $(BIN)/python -m pip install $(QUIET) '$(TORCH)' --index-url '$(TORCH_INDEX)'; fi; \
	$(BIN)/python -m pip install $(QUIET) $$isolated -c constraints.txt -e '.[client,server,demo]'; \
	touch $@

$(VENV)/.dev: $(VENV)/.locked $(VENV)/.ready
	@set -eu; \
	isolated=; if [ -s $(VENV)/.locked ]; then isolated=--no-build-isolation; fi; \
	$(BIN)/python -m pip install $(QUIET) $$isolated -c constraints.txt -e '.[client,server,demo,dev]'; \
	touch $@

$(EXTRAS)/.ready: $(VENV)/.made pyproject.toml constraints.txt requirements/extras.txt setup.py $(wildcard csrc/*)
	@set -eu; \
	echo "installing Thinwire, torch and the packages of requirements/extras.txt into $(EXTRAS)" >&2; \
	[ -x $(EXTRAS)/bin/python ] || $(BIN)/python -m venv $(EXTRAS); \
	if [ -n "$(TORCH_INDEX)" ]; then $(EXTRAS)/bin/python -m pip install $(QUIET) '$(TORCH)' --index-url '$(TORCH_INDEX)'; fi; \
	$(EXTRAS)/bin/python -m pip install $(QUIET) -c constraints.txt -r requirements/extras.txt -e '.[client,server,demo,notebook]' hypothesis pytest; \
	touch $@

# Its headless shell, where there is one, takes the tests two thirds of the CPU; screenshots and benchmarks use chromium.
chromium:
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name >/dev/null 2>&1 && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing chromium for the tests of the dashboard" >&2; \
	  export DEBIAN_FRONTEND=noninteractive; apt-get update -qq >/dev/null; \
	  apt-get install -y -qq chromium chromium-headless-shell >/dev/null 2>&1 || apt-get install -y -qq chromium >/dev/null; \
	else \
	  echo "error: chromium is not installed" >&2; \
	  echo "why:   the tests of the dashboard look at it in a browser" >&2; \
	  echo "try:   sudo apt-get install chromium" >&2; exit 1; fi

# Not an error where it is missing: the tests of the store are skipped on PostgreSQL then, with the reason.
postgresql:
	@if command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing PostgreSQL for the tests of the store" >&2; \
	  apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null; \
	else \
	  echo "PostgreSQL is not installed, so the store is tested on SQLite only" >&2; \
	  echo "try:   sudo apt-get install postgresql" >&2; fi
