# Each target works from a fresh clone; ENGINE=none|ddp|fsdp chooses how `make train` shares out the model.

PYTHON ?= python3
ENGINE ?= fsdp
RUN = runs/emoji-$(ENGINE)
# Two tests at a time: many wait for processes that they started.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
DATA = data/emoji
BIN = .venv/bin
VENV = $(BIN)/.installed
SLURM = slurm-wlm munge iproute2

# One process takes the batch of two: the same global batches, the same losses.
ENGINE_FLAGS_none = --batch-size 256
ENGINE_FLAGS_ddp = --nproc 2 --ddp
# Gathered once a step: on so small a model the collectives cost more than what they carry.
ENGINE_FLAGS_fsdp = --nproc 2 --fsdp --fsdp-no-reshard-after-forward

# Of `make bench`: QUICK=1 for small sizes, to see that all of it works.
QUICK ?=
PEER = .peer

.PHONY: venv data train test test-all test-gpu test-webdataset soak test-slurm lint bench

venv: $(VENV)

$(VENV): setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,demo]'
	touch $@

data: $(DATA)/.prepared

$(DATA)/.prepared: $(VENV) scripts/demo/prepare.py scripts/demo/concepts.py scripts/demo/artists.py
	$(BIN)/python scripts/demo/prepare.py --out $(DATA)
	touch $@

train: $(VENV) $(DATA)/.prepared
	rm -rf $(RUN)
	$(BIN)/shardclip train $(ENGINE_FLAGS_$(ENGINE)) --config scripts/demo/emoji.yaml --name emoji-$(ENGINE)
	$(BIN)/python scripts/demo/report.py $(RUN) --data $(DATA)

test: $(VENV)
	$(PYTEST) -m 'not long and not gpu and not slurm'

test-all: test test-webdataset
	$(PYTEST) -m 'long and not gpu and not slurm'

test-gpu: $(VENV)
	$(BIN)/python -m pytest -m gpu

# What reads by webdataset, with the oldest release that is allowed.
test-webdataset: $(PEER)/python
	$(PEER)/python -m pytest tests/data/test_remote.py

# Fifty kills at random moments of a save.
soak: $(VENV)
	SHARDCLIP_KILLS=50 $(BIN)/python -m pytest -k random_moments tests/distributed/test_faults.py

# A controller and two nodes of a real SLURM on this machine, and two machines as network namespaces. Debian; root.
test-slurm: $(VENV)
	test "$$(id -u)" = 0 || { echo "make test-slurm starts the daemons of SLURM, so it needs root"; exit 1; }
	dpkg -s $(SLURM) >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq $(SLURM); }
	$(BIN)/python -m pytest -m slurm tests/slurm

# open_clip's trainer wants an older webdataset than shardclip does: it finds one in a folder of its own.
$(PEER)/python: $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(PEER)/packages webdataset==0.2.86
	printf '%s\n' '#!/bin/sh' 'here=$$(cd "$$(dirname "$$0")" && pwd)' \
		'PYTHONPATH=$$here/packages exec "$$here/../$(BIN)/python" "$$@"' > $@
	chmod +x $@

bench: $(VENV) $(PEER)/python
	$(BIN)/python scripts/bench/all.py --peer-python $(PEER)/python \
		$(if $(QUICK),--quick --repeats 1 --out runs/bench,--out docs/benchmarks)

# A type checker finds the package by its folder's name, so it is shown one that is called shardclip.
lint: $(VENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .typecheck && ln -sfn ../src .typecheck/shardclip
	MYPYPATH=.typecheck $(BIN)/mypy -p shardclip
