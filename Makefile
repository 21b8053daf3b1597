# engram's tasks. Each target installs what it needs into .venv, so each is enough on a fresh machine that has
# Python >= 3.11 with its headers, make and a C++20 compiler.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# ON in CI. Off otherwise: a compiler we have not met may warn, and that must not break an install.
WERROR ?= OFF
# The newest tensordict we support; constraints.txt has the oldest. torchrl pins the latter, so they cannot share.
TENSORDICT_NEWEST := 0.15.3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
ifeq ($(origin CXX),default)
CXX := c++
endif

# TORCH is remembered (in .venv/.torch) once given, so that a later `make` does not undo the choice.
TORCH_CHOSEN := $(shell cat $(VENV)/.torch 2>/dev/null)
ifeq ($(origin TORCH),undefined)
TORCH := $(or $(TORCH_CHOSEN),$(shell grep '^torch==' constraints.txt))
else
ifneq ($(TORCH),$(TORCH_CHOSEN))
TORCH_CHANGED := FORCE
endif
TORCH_CHOSEN := $(TORCH)
endif

# Folders too: their time changes when a file is removed.
SOURCES := pyproject.toml CMakeLists.txt $(shell find src native -name __pycache__ -prune -o \( -type d -o -name '*.*' \) -print)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test golden test-native test-tensordict check format bench bench-gpu clean distclean FORCE native-binaries negative-controls stress

help:
	@echo "make demo             train a small agent while its processes are killed  STEPS=2000 ARGS='...'"
	@echo "make test             the Python tests                                 ARGS='-k name' WORKERS=2"
	@echo "make test-native      the C++ tests, under address, undefined-behaviour and thread sanitizers"
	@echo "make negative-controls  that they fail where a mechanism that they test is left out"
	@echo "make golden           the golden files of the formats, after a change of one that was meant"
	@echo "make stress           the tests of death and of torn rows, for hours           SIZE=night (or release)"
	@echo "make test-tensordict  the tests that meet tensordict, with $(TENSORDICT_NEWEST)          ARGS='...'"
	@echo "make check            lint, format, types, import layers, strict C++ warnings"
	@echo "make format           format the Python code"
	@echo "make bench            measure engram beside torchrl and cpprb          ARGS='...' REVERB_PYTHON=..."
	@echo "make bench-gpu        measure pinning, copies to a GPU and storages on it  ARGS='...' TORCH=<a CUDA build>"
	@echo "make clean            remove what was built; make distclean removes .venv too"
	@echo
	@echo "Everything is installed into .venv. PYTHON=python3.12 picks the interpreter."
	@echo "TORCH=... picks the torch: any pip requirement such as TORCH=torch (the newest), or TORCH=keep for the one"
	@echo "that is in .venv already. Without it: $(shell grep '^torch==' constraints.txt), as your pip configuration finds it."

# ---- environment -----------------------------------------------------------------------------------------------------

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "engram needs Python >= 3.11, but there is no $(PYTHON). Try make ... PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "engram needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make ... PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "engram compiles an extension, but the headers of $(PYTHON) are missing (Debian, Ubuntu: apt install python3-dev)"; exit 1; }
	@echo 'static_assert(__cplusplus >= 202002L); int main() {}' | $(CXX) -std=c++20 -x c++ -fsyntax-only - || { echo "engram needs a C++20 compiler, and $(CXX) is none. Try make ... CXX=g++-12"; exit 1; }
	@echo "==> Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and by itself, and what came is then pinned: nothing installed later may swap it for another
# build, least of all for gigabytes of CUDA packages on a machine without a GPU.
$(VENV)/.torch: $(VENV)/.python constraints.txt $(TORCH_CHANGED)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@if [ '$(TORCH)' != keep ]; then \
	  echo "==> Installing $(TORCH) (large, the first time)"; \
	  $(PIP) install -c $(VENV)/constraints.txt '$(TORCH)'; \
	fi
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> $(VENV)/constraints.txt 2>/dev/null \
	  || { echo "There is no torch in $(VENV) to keep: install one, or leave TORCH=keep out"; exit 1; }
	@echo '$(TORCH_CHOSEN)' > $@

# The build tools live in .venv as well, pinned, so that no isolated build environment has to be filled each time.
$(VENV)/.build-tools: $(VENV)/.torch
	@echo "==> Installing the build tools"
	@$(PIP) install -c $(VENV)/constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

EXTRAS_demo := demo
EXTRAS_dev := dev,demo
EXTRAS_bench := bench

# An ordinary install, not an editable one: what runs is what a user would get. build/ keeps the object files, so that
# a reinstall after an edit takes seconds.
$(VENV)/.engram-%: $(VENV)/.build-tools $(SOURCES)
	@echo "==> Compiling and installing engram[$(EXTRAS_$*)]"
	@$(PIP) install --no-build-isolation --config-settings=cmake.define.ENGRAM_WERROR=$(WERROR) \
	  -c $(VENV)/constraints.txt '.[$(EXTRAS_$*)]'
	@touch $@

$(VENV)/.rivals: $(VENV)/.torch
	@echo "==> Installing the libraries engram is measured beside"
	@$(PIP) install -c $(VENV)/constraints.txt torchrl cpprb
	@$(PIP) install --no-deps -c $(VENV)/constraints.txt rlox  # its other dependencies are for training
	@touch $@

# ---- tasks -----------------------------------------------------------------------------------------------------------

demo: $(VENV)/.engram-demo
	@$(BIN)/engram demo $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(VENV)/.engram-dev
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

golden: $(VENV)/.engram-dev
	@$(BIN)/python -m tests.golden.make

# How much the tests of stress do: small in `make test` and `make test-native`.
SIZE := night
stress: $(VENV)/.engram-dev
	@ENGRAM_STRESS=$(SIZE) $(MAKE) --no-print-directory test-native
	@ENGRAM_STRESS=$(SIZE) $(BIN)/python -m pytest -n $(WORKERS) -m stress $(ARGS)

# REVERB_PYTHON, from the command line or the environment: Python of an environment with dm-reverb[tensorflow].
bench: $(VENV)/.engram-bench $(VENV)/.rivals
	@$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(VENV)/.engram-bench $(VENV)/.rivals
	@$(BIN)/python -m benchmarks.bench_gpu $(ARGS)

NEWEST := build/tensordict-$(TENSORDICT_NEWEST)

$(NEWEST)/.installed: $(VENV)/.torch
	@echo "==> Installing tensordict $(TENSORDICT_NEWEST) into $(NEWEST)"
	@rm -rf $(NEWEST)
	@$(PIP) install --no-deps --target $(NEWEST) tensordict==$(TENSORDICT_NEWEST)
	@touch $@

# The tests that meet tensordict; the others do not care which one is there.
TENSORDICT_TESTS := tests/storages tests/format/test_layout.py tests/buffer/test_tensordict_shortcuts.py \
  tests/buffer/test_tensordict.py tests/test_collate.py tests/buffer/test_basic_use.py tests/buffer/test_open.py tests/test_docs.py
test-tensordict: $(VENV)/.engram-dev $(NEWEST)/.installed
	@PYTHONPATH=$(NEWEST) $(BIN)/python -c 'import tensordict as t; assert t.__version__ == "$(TENSORDICT_NEWEST)", t.__version__; print("==> Testing with tensordict", t.__version__)'
	@PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n $(WORKERS) $(TENSORDICT_TESTS) $(ARGS)

check: $(VENV)/.engram-dev
	@echo "==> ruff";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "==> mypy";         $(BIN)/mypy --no-error-summary
	@echo "==> import layers"; PYTHONPATH=src $(BIN)/lint-imports --no-logo
	@echo "==> no code from files: no pickle, torch.load, eval"; \
	  ! grep -rnE --include='*.py' '(pickle|marshal|dill|joblib)\.(loads?|Unpickler)\b|\btorch\.(load|save)\(|(^|[^.[:alnum:]_])(eval|exec)\(|allow_pickle=True' src/engram
	@echo "==> only _native imports the extension"; \
	  ! grep -rnE --include='*.py' '(from|import) +engram\._core|from +engram +import +.*\b_core\b' src/engram | grep -v '^src/engram/_native\.py:'
	@echo "==> only the stable ABI: from Python 3.12 on the bindings are compiled without CPython's macros"; \
	  ! grep -nE '\bPy[A-Za-z]+_(AS|GET|SET)_[A-Z]+' native/bind/*
ifeq ($(WERROR),ON)
	@echo "==> strict C++ warnings: those that compile and test stop at them anyway"
else
	@echo "==> strict C++ warnings"; $(MAKE) --no-print-directory -j$(JOBS) $(STRICT)
endif

# No prerequisite: formatting must not wait for a compiler each time.
format:
	@test -x $(BIN)/ruff || $(MAKE) --no-print-directory $(VENV)/.engram-dev
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f $(VENV)/.engram-*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean
	rm -rf $(VENV)

# ---- native code -----------------------------------------------------------------------------------------------------

CORE := $(wildcard native/core/*.cpp)
NATIVE_TESTS := $(wildcard native/tests/test_*.cpp)
# What threads share. ENGRAM_TSAN builds the variant without fences, which the thread sanitizer does not model.
TSAN_TESTS := $(wildcard native/tests/test_control*.cpp native/tests/test_pool*.cpp native/tests/test_priorities*.cpp \
  native/tests/test_expand*.cpp native/tests/test_recovery_threads*.cpp native/tests/test_epoch*.cpp native/tests/test_pause*.cpp \
  native/tests/test_store_threads*.cpp native/tests/test_trajectories*.cpp native/tests/test_windows*.cpp)
# What sanitizers get in the way of: single steps, and fork beside threads.
PLAIN_TESTS := $(wildcard native/tests/test_crash*.cpp native/tests/test_fork*.cpp native/tests/test_participants*.cpp \
  native/tests/test_torn*.cpp)
NATIVE_FLAGS := -std=c++20 -Wall -Wextra $(if $(filter ON,$(WERROR)),-Werror) -pthread -Inative -Inative/core -MMD -MP
SANITIZE_asan := -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS
SANITIZE_tsan := -fsanitize=thread -DENGRAM_TSAN
SANITIZE_plain := -O2
ASAN_TESTS := $(filter-out $(PLAIN_TESTS),$(NATIVE_TESTS))
BINARIES := $(ASAN_TESTS:native/tests/%.cpp=build/native/asan/%) $(TSAN_TESTS:native/tests/%.cpp=build/native/tsan/%) \
  $(PLAIN_TESTS:native/tests/%.cpp=build/native/plain/%)
# gcc's thread sanitizer gives up where the kernel randomizes addresses more than it expects.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Several at a time, each with its output in one piece; alone is who must go on within a second of a death beside it.
ALONE := $(filter %/test_crash_beside,$(BINARIES))
RUN := $(MAKE) --no-print-directory -j$(JOBS) $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

test-native:
	@echo "==> Compiling the C++ tests with sanitizers"
	@$(MAKE) --no-print-directory -j$(JOBS) native-binaries
	@$(RUN) $(patsubst %,run/%,$(filter-out $(ALONE),$(BINARIES)))
	$(if $(ALONE),@$(RUN) $(ALONE:%=run/%))

run/%: FORCE
	@echo "==> $*"
	@UBSAN_OPTIONS=print_stacktrace=1 $(NO_ASLR) $*

native-binaries: $(BINARIES)

# Of debug information only lines, for stack traces: the rest takes a third of the time. Tests are not optimized beyond -O1,
# the core is, where it is not under a sanitizer.
COMPILE = $(CXX) $(NATIVE_FLAGS) -O1 -g1 -fno-omit-frame-pointer
define flavour
.PRECIOUS: build/native/$(1)/%.o
build/native/$(1)/%.o: native/%.cpp
	@mkdir -p $$(@D)
	@echo "    $(1) $$<"
	@$(COMPILE) $(SANITIZE_$(1)) $$(if $$(filter native/tests/%,$$<),-O1) -c -o $$@ $$<

build/native/$(1)/%: build/native/$(1)/tests/%.o $(CORE:native/%.cpp=build/native/$(1)/%.o)
	@$(CXX) -pthread $(SANITIZE_$(1)) -o $$@ $$^
endef
$(eval $(call flavour,asan))
$(eval $(call flavour,tsan))
$(eval $(call flavour,plain))

# Each of these builds lacks one mechanism: the sources that name it are compiled without it. What tests it must fail then: a
# test that cannot fail proves nothing.
CONTROLS := without-claim/test_crash_tree without-redo/test_crash_tree without-proof_of_death/test_participants \
  without-ticket_check/test_torn without-cas/test_crash without-lap_check/test_crash without-robust_mutex/test_crash_beside \
  without-late_check/test_priorities without-proof_of_death/test_crash_beside without-pause/test_pause \
  without-replacing/test_crash_replace without-laps/test_crash_laps
define control
build/native/$(1)/%.o: native/%.cpp
	@mkdir -p $$(@D)
	@echo "    $(1) $$<"
	@$(COMPILE) $(SANITIZE_plain) -D$(2) -c -o $$@ $$<

build/native/$(1)/%: build/native/plain/tests/%.o $(foreach c,$(CORE),$(c:native/%.cpp=build/native/$(if $(findstring $(c),$(3)),$(1),plain)/%.o))
	@$(CXX) -pthread $(SANITIZE_plain) -o $$@ $$^
endef
macro = ENGRAM_$(shell echo $(1) | tr a-z- A-Z_)
$(foreach f,$(sort $(patsubst %/,%,$(dir $(CONTROLS)))),$(eval $(call control,$(f),$(call macro,$(f)),$(shell grep -lw '$(call macro,$(f))' $(CORE)))))

negative-controls:
	@echo "==> Compiling the C++ tests without what they test"
	@$(MAKE) --no-print-directory -j$(JOBS) native-binaries BINARIES="$(CONTROLS:%=build/native/%)"
	@for control in $(CONTROLS); do \
	  echo "==> $$control"; \
	  if timeout 120 build/native/$$control >build/native/$$control.log 2>&1; then echo "passes all the same"; exit 1; fi; \
	  grep -m 1 'FAILED' build/native/$$control.log || echo "    died, as it should"; \
	done

# Every native source on its own, with warnings as errors and without waiting for an optimizer.
STRICT := $(patsubst native/%.cpp,build/strict/%.ok,$(CORE) $(wildcard native/bind/*.cpp) $(NATIVE_TESTS))
build/strict/bind/%.ok: PYTHON_FLAGS = -fvisibility=hidden -isystem $(shell $(BIN)/python -m nanobind --include_dir) \
  -isystem $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
build/strict/%.ok: native/%.cpp
	@mkdir -p $(@D)
	@$(CXX) $(NATIVE_FLAGS) -MF $(@:.ok=.d) -MT $@ -Werror $(PYTHON_FLAGS) -fsyntax-only $<
	@touch $@

-include $(wildcard build/native/*/*/*.d build/strict/*/*.d)
