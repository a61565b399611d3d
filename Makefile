# make bench    move real KV blocks between two processes and print figures
# make test     the whole test suite
# make help     the rest

.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python
STAMPS := .venv/stamps
INPUTS := pyproject.toml setup.py scripts/make_venv.sh $(wildcard kvnixl/*.pyx csrc/*.h)
PYTEST_ARGS ?=
BENCH_ARGS ?=

export PYTHONUNBUFFERED := 1

.PHONY: help
help:
	@echo 'make bench          run the benchmark (BENCH_ARGS="--model qwen3-8b" for options)'
	@echo 'make bench-vllm     the connector beside the one of vLLM, in real engines'
	@echo 'make test           run all tests (PYTEST_ARGS="-k transport" for options)'
	@echo 'make test-vllm      of these, the ones that run vLLM'
	@echo 'make check          formatting, linting, types'
	@echo 'make test-asan      the extensions under AddressSanitizer and UBSan'
	@echo 'make test-native    the lease-slot protocol in C under ThreadSanitizer and valgrind'
	@echo 'make mutations      break the lease protocol in a dozen ways; the tests must notice each'
	@echo 'make soak           read and overwrite for a minute; no wrong byte may be accepted'
	@echo 'make bench-suite    the pytest-benchmark suites in bench/'
	@echo 'make clean          remove what was built'

$(STAMPS)/%: $(INPUTS)
	scripts/make_venv.sh $*
	@mkdir -p $(STAMPS) && touch $@

.PHONY: bench
bench: $(STAMPS)/core
	$(PY) -m kvnixl.bench $(BENCH_ARGS)

.PHONY: bench-vllm
bench-vllm: $(STAMPS)/test
	$(PY) -m kvnixl.bench vllm $(BENCH_ARGS)

.PHONY: test
test: $(STAMPS)/test
	$(PY) -m pytest -m 'not vllm' $(PYTEST_ARGS) || [ $$? = 5 ]  # 5: PYTEST_ARGS chose none of them
	$(MAKE) test-vllm

.PHONY: test-vllm
test-vllm: $(STAMPS)/test
	$(PY) -m pytest -m vllm $(PYTEST_ARGS) || [ $$? = 5 ]

.PHONY: check
check: $(STAMPS)/dev
	scripts/check.sh

.PHONY: test-asan
test-asan: $(STAMPS)/test
	PYTHON=$(PY) scripts/test_asan.sh

.PHONY: test-native
test-native:
	scripts/test_native.sh

.PHONY: mutations
mutations: $(STAMPS)/dev
	$(PY) scripts/mutation_check.py

.PHONY: soak
soak: $(STAMPS)/core
	$(PY) scripts/soak.py

.PHONY: bench-suite
bench-suite: $(STAMPS)/test
	$(PY) -m pytest bench -o 'python_files=bench_*.py' --benchmark-only $(PYTEST_ARGS)

.PHONY: clean
clean:
	rm -rf build .venv/stamps kvnixl/*.so kvnixl.egg-info
