# Two commands do everything: `make demo` and `make test`. Set-up happens by itself, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
DEMO := demo
SEED ?= 0
# One thread per rank: on a small machine ranks that share cores would otherwise fight for them.
RUN := OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $(BIN)/torchrun --nproc_per_node=$(RANKS) --standalone --local-addr=127.0.0.1
# Given to pip for torch alone: `make setup TORCH_OPTIONS="--index-url URL"` takes a build for another CUDA version.
TORCH_OPTIONS ?=
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format setup setup-test ffcv browser fashion drill gpu-check clean help
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/ready
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Evenhand needs Python 3.11 or newer; say which with: make PYTHON=python3.12"; exit 2; }
	@echo "setting up $(VENV) (once; this downloads packages)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) $(TORCH_OPTIONS) torch==2.13.0 torchvision==0.28.0
	@$(INSTALL) -e .
	@touch $@

setup-test: $(VENV)/ready-test
$(VENV)/ready-test: $(VENV)/ready
	@$(INSTALL) -e '.[deepspeed,s3,dev]'
	@touch $@

# What pip cannot bring. On Debian as root it is installed; elsewhere one line says what is left out.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300
CAN_APT := command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]
define apt_install
	echo "installing $(1)"; $(APT) update && $(APT) install -y --no-install-recommends $(1) >/dev/null
endef

ffcv: $(VENV)/ready
	@$(BIN)/python -c 'import ffcv' 2>/dev/null && exit 0; \
	have() { pkg-config --exists opencv4 libturbojpeg; }; \
	if ! have && $(CAN_APT); then $(call apt_install,libopencv-dev libturbojpeg0-dev pkg-config); fi; \
	if have; then $(INSTALL) -e '.[ffcv]'; \
	else echo "FFCV is left out: it needs the packages libopencv-dev, libturbojpeg0-dev and pkg-config. Its tests are skipped."; fi

browser:
	@have() { command -v chromium && command -v chromedriver; } >/dev/null; \
	have && exit 0; \
	if $(CAN_APT); then $(call apt_install,chromium chromium-driver); fi; \
	have || echo "The browser tests are left out: they need the packages chromium and chromium-driver."

fashion:
	@have() { test -d /usr/share/datasets/fashion-mnist; }; \
	have && exit 0; \
	if $(CAN_APT); then $(call apt_install,dataset-fashion-mnist); fi; \
	have || echo "The drill on the real Fashion-MNIST is left out: it needs the package dataset-fashion-mnist."

demo: setup ## digits, rho=10, noise 0.5: cross-entropy, the Prototypical Classifier and Evenhand on 2 ranks, and a report
	@for method in cross_entropy prototypical evenhand; do \
	  echo; echo "== $$method =="; \
	  $(RUN) -m pipeline.train --config configs/digits.yaml method.name=$$method seed=$(SEED) train.epochs=40 \
	    output=$(DEMO)/$$method-$(SEED) tracking.uri=sqlite:///$(DEMO)/mlflow.db tracking.experiment=demo || exit 1; \
	done
	@$(BIN)/python -m pipeline.report uri=sqlite:///$(DEMO)/mlflow.db experiment=demo out=$(DEMO)

test: setup-test ffcv browser ## the whole suite
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile tests

lint: setup-test ## lint, format, types and dependencies
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/deptry pipeline shards launch

format: setup-test ## put every file in form
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

drill: setup-test ffcv browser fashion ## the long drills: random kills, every file event of a save
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests

gpu-check: setup ## on a machine with GPUs, two minutes: exact results on all of them, memory, images per second
	@$(BIN)/python -m launch.gpu_check

clean: ## remove what demo and tests made (not .venv)
	@rm -rf $(DEMO) runs data .pytest_cache .mypy_cache .ruff_cache
