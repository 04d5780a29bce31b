# Every target makes the environment it needs first, and again when pyproject.toml has changed.

BACKEND ?= tensorflow
SHARED  ?= ../shared
JOBS    ?= 2
PIP     := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test parity real-model bench lint types
.DELETE_ON_ERROR:

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

demo: .venv/.installed  ## fine-tune, save, reload: MODEL=<folder or Hub id> DATA=<chat .jsonl> BACKEND=tensorflow|jax OUTPUT=<folder>
	KERAS_BACKEND=$(BACKEND) TF_CPP_MIN_LOG_LEVEL=3 .venv/bin/python -m keras_qwen.demo \
		$(if $(MODEL),--model "$(MODEL)") $(if $(DATA),--data "$(DATA)") $(if $(OUTPUT),--output "$(OUTPUT)")

test: .venv/.installed  ## the test suite on TensorFlow, then on JAX: ARGS=<more for pytest> JOBS=<processes>
	@failed=; for backend in tensorflow jax; do \
		echo "== tests on $$backend"; \
		KERAS_BACKEND=$$backend .venv/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS) || failed="$$failed $$backend"; \
	done; test -z "$$failed" || { echo "tests failed on:$$failed" >&2; exit 1; }

parity: .venv/.installed .venv-parity/.installed  ## beside transformers and peft, on the torch backend, and the acceptance checks
	KERAS_BACKEND=torch .venv-parity/bin/python -m pytest tests/parity $(ARGS)
ifneq ($(wildcard $(SHARED)/acceptance),)
	KERAS_BACKEND=tensorflow .venv/bin/python $(SHARED)/acceptance/reference.py --dense
	KERAS_BACKEND=jax .venv/bin/python $(SHARED)/acceptance/reference.py --dense
	@if .venv/bin/python $(SHARED)/real_model/fetch.py; then \
		KERAS_BACKEND=jax .venv/bin/python $(SHARED)/acceptance/chat_masks.py; \
	else \
		echo "not run: acceptance/chat_masks.py, because the real model's tokenizer could not be fetched"; \
	fi
else
	@echo "not run: the acceptance checks, because $(SHARED)/acceptance is not here"
endif

real-model: .venv/.installed  ## token ids, losses and greedy continuations of a real 0.5 B checkpoint, on both backends
ifneq ($(wildcard $(SHARED)/real_model),)
	@if .venv/bin/python $(SHARED)/real_model/fetch.py; then \
		KERAS_BACKEND=tensorflow .venv/bin/python $(SHARED)/acceptance/real_model.py && \
		KERAS_BACKEND=jax .venv/bin/python $(SHARED)/acceptance/real_model.py; \
	else \
		echo "not run: the real-model check, because the checkpoint could not be fetched"; \
	fi
else
	@echo "not run: the real-model check, because $(SHARED)/real_model is not here"
endif

bench: .venv/.installed  ## the benchmarks: ARGS=<case and options>
	.venv/bin/python -m benchmarks $(ARGS)

lint: .venv/.installed  ## ruff: rules and format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/.installed  ## mypy
	.venv/bin/mypy

# $(call make_venv,FOLDER): an environment of the first Python that will do.
define make_venv
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
			exec $$python -m venv $(1); \
		fi; \
	done; \
	echo "No Python 3.11, 3.12 or 3.13 was found; install one, or say where it is: make PYTHON=<path>" >&2; exit 1
endef

.venv/.installed: pyproject.toml
	$(call make_venv,.venv)
	@echo "Installing into .venv: both backends and the tools, a few minutes the first time"
	.venv/bin/python $(PIP) -e ".[tensorflow,jax,dev]"
	@touch $@

# torch goes first and alone, so that a CPU build already there, or the one your index offers, is kept by what follows.
.venv-parity/.installed: pyproject.toml
	$(call make_venv,.venv-parity)
	@echo "Installing into .venv-parity: torch, transformers, trl and peft, a few minutes the first time"
	.venv-parity/bin/python $(PIP) torch==2.13.0
	.venv-parity/bin/python $(PIP) -e ".[parity]"
	@touch $@
