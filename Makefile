# Every target sets up what it needs by itself, in .venv/ and build/; `make help` lists them.
# Needed beforehand: Python >= 3.11 with its headers, a C compiler, and Java >= 17 for Spark.
# Tests on a real Kafka broker are skipped without Maven.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help java demo demo-crash demo-kafka soak test faults cluster-faults test-core test-spark test-thin-client build lint bench bench-quick bench-spark bench-flow bench-kafka bench-compare docs mutations sanitize sdist wheels test-arm64 clean

# Options passed on: make demo ARGS="--lines 100000", make test K=ledger ARGS="-x --pdb"
ARGS ?=
K ?=
PYTHONS ?= 3.11 3.12 3.13 3.14 3.13t 3.14t
BASE ?= HEAD
OTHER ?=
SOAK_S ?= 3600
VERSION ?=
# What is run on each wheel: all tests without Spark, or `compiled`, those of what is compiled.
WHEEL_TESTS ?= all

PY := .venv/bin/python
PYTEST := $(PY) -m pytest $(if $(K),-k "$(K)")
CORE := tests --ignore tests/spark --ignore tests/cli --ignore tests/ui --ignore tests/faults
# What runs compiled code; the rest is Python, alike in every build.
COMPILED := $(filter-out $(patsubst %,tests/test_%.py,fault_list imports journal mutations retry),$(wildcard tests/test_*.py))
# By four at a time, because many tests wait; one of the four begins with the tests without Spark.  One
# area, tests with a mark, or with a debugger run one by one.  With Spark a file stays together: its
# tests share a session.
by_four = $(if $(K)$(findstring pdb,$(ARGS))$(filter -m,$(ARGS)),,-n 4 --dist $1 -p no:benchmark)
BENCH := $(PYTEST) --benchmark-columns=median,iqr,rounds --benchmark-sort=fullname

# Spark's workers must run the interpreter that the extension was built for.
export PYSPARK_PYTHON := $(CURDIR)/$(PY)
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(PY)
# Where the environment forbids bytecode, each of some hundred processes would compile all it imports.
export PYTHONDONTWRITEBYTECODE :=
# Pins what is installed here, and what builds it.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: java .venv/.built ## a topology whose bolts fail: every line is accounted for (ARGS="--lines 100000")
	@$(PY) -m ackcore.examples.word_count $(ARGS)

demo-crash: java .venv/.built ## the same, killed at random points and started again (ARGS="--kills 9")
	@$(PY) -m ackcore.examples.word_count --kills 5 $(ARGS)

demo-kafka: java .venv/.built ## lines of a Kafka topic, killed twice; starts a broker (Maven) (ARGS="--kills 3")
	@.ci/need maven >/dev/null
	@$(PY) tests/kafka/with_broker.py $(PY) -m ackcore.examples.kafka_lines --bootstrap-servers {} $(ARGS)

soak: java .venv/.built ## an hour of chaos: drivers, executors, workers killed at random (SOAK_S=3600)
	@ACKCORE_REQUIRE_NATIVE=1 ACKCORE_SOAK_S=$(SOAK_S) $(PYTEST) tests/faults/test_soak.py -m faults -s $(ARGS)

test: java .venv/.built .venv/spark-classes.jsa ## all tests but the slow fault runs (K=expression, ARGS="pytest options")
	@ACKCORE_REQUIRE_NATIVE=1 $(PYTEST) $(call by_four,loadfile) $(ARGS)

# A server that is not there fails its tests: what is skipped here is shown nowhere else.
# `ACKCORE_REQUIRE_KAFKA= make faults` skips those of a broker, and the end names each skip.
faults: export ACKCORE_REQUIRE_CONNECT ?= 1
faults: export ACKCORE_REQUIRE_HDFS ?= 1
faults: export ACKCORE_REQUIRE_KAFKA ?= 1
faults: export ACKCORE_REQUIRE_POSTGRES ?= 1
faults: export ACKCORE_REQUIRE_S3 ?= 1
faults: java .venv/.built .venv/spark-classes.jsa ## the slow fault runs, one by one: processes killed or stopped at each step (K=paused)
	@ACKCORE_REQUIRE_NATIVE=1 $(PYTEST) tests -m faults -rs $(ARGS)

cluster-faults: java .venv/.built ## a Spark cluster of hosts that are cut off from each other; a quarter of an hour, as root (K=worker)
	@ACKCORE_REQUIRE_NATIVE=1 ACKCORE_REQUIRE_S3=1 $(PYTEST) tests/faults/test_hosts_cut_off.py -m cluster -rs $(ARGS)

test-core: .venv/.built ## the kernel and all that stands below Spark, in a minute; no Java (K=..., ARGS=...)
	@ACKCORE_REQUIRE_NATIVE=1 $(PYTEST) $(CORE) -m "not faults and not broker" $(call by_four,worksteal) $(ARGS)

test-spark: java .venv/.built ## tests/spark on another version of Spark (VERSION=4.0, K=..., ARGS=...)
	@.ci/test-spark "$(VERSION)" $(if $(K),-k "$(K)") $(ARGS)

test-thin-client: java .venv/.built ## PySpark's client without a JVM (VERSION=4.2), on a Spark Connect server of .venv's Spark
	@.ci/test-thin-client "$(VERSION)"

build: .venv/.built ## compile the extensions in place

lint: .venv/.built .venv/.lint ## ruff, clang-format, C warnings, cython-lint, mypy --strict, stubs against the module
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@! grep -rnE --include='*.py' --include='*.px[id]' '"""(What|Who|Whose|As|Of|Which) ' ackcore bench pyx tests || \
	    { echo 'docstrings: begin with a noun phrase or an imperative verb, not with these words' >&2; exit 1; }
	PATH="$(CURDIR)/.venv/bin:$$PATH" cython-lint pyx/*.pyx pyx/*.pxd pyx/*.pxi
	.venv/bin/clang-format --dry-run -Werror pyx/*.h pyx/*.c
	for c in pyx/kernel_*.c pyx/lock.h pyx/offset_holes.h pyx/pack.h pyx/rows.h; do for flag in -UACKCORE_CHECKED -DACKCORE_CHECKED; do \
	    $(CC) -O1 -Wall -Wextra -Werror $$flag -isystem "$$($(PY) -c \
	        'import sysconfig; print(sysconfig.get_path("include"))')" \
	        -x c -S -o /dev/null $$c || exit 1; done; done
	$(PY) -m mypy
	$(PY) -m mypy.stubtest ackcore._native ackcore._kafka_native

bench: java .venv/.built .venv/.bench ## measure all but Kafka; ends with each ratio beside its bound (K=..., ARGS=...)
	@ACKCORE_REQUIRE_NATIVE=1 $(BENCH) bench --ignore bench/bench_kafka.py $(ARGS)

bench-quick: java .venv/.built .venv/.bench ## the same in small, two at a time and without ratios, to see that the benches still run
	@ACKCORE_REQUIRE_NATIVE=1 $(PYTEST) bench --quick --benchmark-disable -n 2 --dist loadfile --ignore bench/bench_kafka.py $(ARGS)

bench-spark: java .venv/.built .venv/.bench ## topologies and settling against bare Spark (ARGS=--quick: in small)
	@ACKCORE_REQUIRE_NATIVE=1 $(BENCH) bench/bench_topology.py bench/bench_seen.py bench/bench_settle.py bench/bench_bucket.py $(ARGS)

bench-flow: java .venv/.built .venv/.bench ## flow control: its cost, 12 real HTTP servers, calls on Spark; draws build/bench/flow.svg
	@ACKCORE_REQUIRE_NATIVE=1 $(BENCH) bench/bench_flow.py bench/bench_calls.py $(ARGS)
	@$(PY) -m bench.plot_flow build/bench/flow.json build/bench/flow.svg

bench-kafka: java .venv/.built .venv/.bench ## records of a real broker (Maven) on Spark against other ways to read them (ARGS=--quick: in small)
	@ACKCORE_REQUIRE_NATIVE=1 $(BENCH) bench/bench_kafka.py $(ARGS)

bench-compare: .venv/.built .venv/.bench ## two commits in turn: BASE=commit, the tree or OTHER=commit (ARGS="-k merge", ARGS=--spark: topologies)
	@$(PY) -m bench.compare $(BASE) $(OTHER) $(ARGS)

docs: .venv/.built .venv/.docs ## the documentation, in build/docs/html; a warning is an error
	@$(PY) -m bench.plot bench/results.md docs/_static/rates.svg
	@$(PY) -m sphinx -q -W --keep-going -b html docs build/docs/html $(ARGS)
	@echo "ackcore: build/docs/html/index.html"

mutations: java .venv/.built ## put known bugs in, one by one, and see each caught by its test
	@$(PY) tests/mutations.py $(ARGS)

# PYTHONMALLOC: ASan sees only what malloc hands out. Leaks: an interpreter that exits frees little.
# allocator_may_return_null: a test asks for more memory than there is.
sanitize: .venv/.built ## the tests of what is compiled, on an ASan and UBSan build in build/sanitize
	@mkdir -p build/sanitize/lib
	@find build/sanitize/lib -name '*.py' -delete
	@ACKCORE_SANITIZE=1 $(PY) setup.py -q build --build-base build/sanitize \
	    --build-lib build/sanitize/lib >build/sanitize/build.log 2>&1 || \
	    { cat build/sanitize/build.log; exit 1; }
	@LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	PYTHONPATH=$(CURDIR)/build/sanitize/lib PYTHONSAFEPATH=1 ACKCORE_REQUIRE_NATIVE=1 \
	$(PYTEST) $(COMPILED) -k "$(or $(K),not ackcore._reference)" $(call by_four,worksteal) $(ARGS)

sdist: .venv/.tools
	@rm -rf dist
	@$(PY) -m build -q --sdist --no-isolation

# .venv's Python is tested with Spark, too. pyspark is not made for free-threaded ones.
wheels: java sdist ## manylinux wheels in dist/, each tested as installed (PYTHONS="3.12 3.14t": these; WHEEL_TESTS=compiled)
	@own=$$($(PY) -c 'import sys, sysconfig; print("%d.%d" % sys.version_info[:2] \
	    + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'); \
	absent=; export WHEEL_TESTS="$(if $(filter compiled,$(WHEEL_TESTS)),$(COMPILED),tests)"; \
	for version in $(PYTHONS); do \
	    if [ "$$version" = "$$own" ]; then .ci/wheel "$(PY)" spark,cli || exit 1; \
	    elif python=$$(.ci/need python $$version 2>/dev/null); then .ci/wheel "$$python" || exit 1; \
	    else absent="$$absent $$version"; fi; \
	done; \
	[ -z "$$absent" ] || echo "ackcore: no wheel, as they are not here: Python$$absent" \
	    "(what is missing: .ci/need python VERSION)"

test-arm64: sdist ## a wheel for aarch64, and the tests without Spark on it under emulation (root, Debian)
	@.ci/test-arm64 $(if $(K),-k "$(K)") $(ARGS)

clean: ## remove all that the other targets made
	rm -rf .venv .venv-spark-* .venv-client-* build dist ackcore.egg-info ackcore/*.so .benchmarks .hypothesis spark-warehouse
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find ackcore tests bench -name __pycache__ -prune -exec rm -rf {} +

# ------------------------- set-up: what is missing is said first, and each step is done once

java:
	@.ci/need java >/dev/null

$(PY):
	@.ci/need cc >/dev/null
	@python=$$(.ci/need python) && echo "ackcore: making .venv with $$python" && \
	    "$$python" -m venv --clear .venv

.venv/.tools: pyproject.toml constraints.txt | $(PY)
	@echo "ackcore: installing what it needs into .venv (pyspark is large: minutes, the first time)"
	@$(PY) -m pip install -q --upgrade pip
	@$(PY) -m pip install -q --group build --group test --group servers $$($(PY) -c 'import tomllib; \
	    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["dependencies"], *sum(project["optional-dependencies"].values(), []))')
	@touch $@

.venv/.built: .venv/.tools setup.py $(wildcard pyx/*)
	@.ci/need cc >/dev/null
	@echo "ackcore: compiling its extensions"
	@mkdir -p build; PIP_BUILD_CONSTRAINT= $(PY) -m pip install --no-deps --no-build-isolation -e . \
	    >build/install.log 2>&1 || { cat build/install.log; exit 1; }
	@touch $@

# An older one stays in use until it is written anew; without it the tests pass, too.
.venv/spark-classes.jsa: tests/spark_classes.py .venv/.tools | java .venv/.built
	@$(PY) tests/spark_classes.py $@ || echo "ackcore: no archive of Spark's classes; its JVMs start more slowly" >&2

.venv/.lint .venv/.bench .venv/.docs: .venv/.%: .venv/.tools
	@$(PY) -m pip install -q --group $*
	@touch $@
