# pairmill: `make demo` and `make test` each set everything up by themselves.
#   make demo    set up and run the whole way on a small made-up world (no network, about 6 minutes on 2 cores)
#   make test    set up and pass the tests
#   make check   format, lint, types, lock file, import rule, known vulnerabilities (where a network allows to ask), documentation
#   make docs    build the documentation into build/site; open build/site/index.html
#   make bench   every bench that needs no heavy peer
#   make peers   side environments for the packages we are measured against, and the benches beside them (3 GB, network)
#   make simd    compile pillow-simd in Pillow's place (needs the headers of libjpeg and zlib)
#   make lock    renew requirements.lock from what is installed now
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := dev,docs,dali,s3
# Set PAIRMILL_REAL_DATA to the folder of the real data sets to run the tests marked realdata as well.

.PHONY: setup demo test check docs bench peers simd lock clean flickr8k

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "pairmill needs Python 3.11 or newer; none was found. Install it, or run: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pairmill needs Python 3.11 or newer; $(PYTHON) is older. Run: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[$(EXTRAS)]'
	touch $@

demo: setup
	$(BIN)/pairmill demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layout.py tests/test_lock.py
	$(BIN)/python -m bench.vulnerable
	$(MAKE) --no-print-directory docs

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build # with --quiet it would not count its warnings, and none would fail it

bench: setup
	for b in dedup loss pack; do $(BIN)/python -m bench.$$b --json || exit 1; done

# The tests that ask for a side environment with `ready` or `peer_python`, then the shortest bench beside
# a heavy peer; the others (chain, dedup, ingest, parity, tokenizer, train) want data or an hour and are run by name.
peers: setup
	$(BIN)/python -m bench.peers all
	$(BIN)/python -m pytest $$(grep -lE "from bench.peers import|from bench import peers" -r tests --include='test_*.py')
	$(BIN)/python -m bench.loader --json

flickr8k: setup
	@test -n "$(DATA)" || { echo "say where Flickr8k lies: make flickr8k DATA=/path/to/flickr8k"; exit 1; }
	$(BIN)/python -m bench.flickr8k --data "$(DATA)"

simd: setup
	$(BIN)/pip install --quiet --force-reinstall --no-deps pillow-simd

lock: setup
	( echo "# Versions everything was tested with; renew with 'make lock'. Used as constraints by the Makefile."; \
	  $(BIN)/pip freeze --all --exclude-editable | grep -v "^pip==" | sed "s/+cpu//" ) > requirements.lock

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
