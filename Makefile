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

CONFIG := $(ARCH)-$(notdir $(firstword $(CC)))$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(DEBUG),-debug)
comma := ,
O := build/obj/$(CONFIG)
# The plain build leaves build/sooth; every other configuration keeps its results to itself.
DEFAULT_CONFIG := $(shell uname -m)-$(notdir $(firstword $(CC)))
OUT := $(if $(filter $(CONFIG),$(DEFAULT_CONFIG)),build,$(O))

WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Wconversion -Wno-sign-conversion
CFLAGS ?= -O2 -g
ALL_CFLAGS := -std=c11 -D_GNU_SOURCE -DSO_VERSION='"$(VERSION)"' -Isrc -Iinclude $(WARN) -ffp-contract=off \
  -fno-math-errno -fPIC -fvisibility=hidden -pthread $(shell $(PKG_CONFIG) --cflags $(PKGS)) $(CFLAGS)
LDLIBS := $(shell $(PKG_CONFIG) --libs $(PKGS)) -lm -pthread
LDFLAGS ?=
ifneq ($(SAN),)
ALL_CFLAGS += -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif

X86_ONLY := $(wildcard src/*/cpu/*_avx2.c src/*/cpu/*_avx512.c)
LIB_SRC := $(filter-out src/cli/%,$(wildcard src/*/*.c src/*/*/*.c))
ifneq ($(ARCH),x86_64)
LIB_SRC := $(filter-out $(X86_ONLY),$(LIB_SRC))
endif
CLI_SRC := $(wildcard src/cli/*.c)
TEST_SRC := $(wildcard tests/*/test_*.c)
TEST_LIB_SRC := $(wildcard tests/support/*.c)
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
EXAMPLE_SRC := $(wildcard examples/*.c)

LIB_OBJ := $(LIB_SRC:%.c=$(O)/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(O)/%.o)
TEST_LIB_OBJ := $(TEST_LIB_SRC:%.c=$(O)/%.o)
TEST_BIN := $(TEST_SRC:tests/%.c=$(O)/tests/%)
FUZZ_BIN := $(FUZZ_SRC:tests/%.c=$(O)/tests/%)
EXAMPLE_BIN := $(EXAMPLE_SRC:examples/%.c=$(OUT)/examples/%)

.PHONY: all help
all: $(OUT)/sooth $(OUT)/libsooth.a $(OUT)/libsooth.so $(OUT)/sooth.pc $(EXAMPLE_BIN) ## build the command and the library

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

# Kernels for one instruction set each; only these files may use its intrinsics.
$(O)/src/%_avx2.o: ISA := -mavx2 -mfma -mf16c
$(O)/src/%_avx512.o: ISA := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni

# Rewritten only when the flags change; every object depends on it.
$(O)/flags: FORCE
	@mkdir -p $(O); echo '$(CC) $(subst ','\'',$(ALL_CFLAGS)) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(subst ','\'',$(ALL_CFLAGS)) $(LDFLAGS)' > $@
.PHONY: FORCE
FORCE:

$(O)/%.o: %.c $(O)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) $(ISA) -MMD -MP -c $< -o $@

$(OUT)/libsooth.a: $(LIB_OBJ)
	@mkdir -p $(@D)
	rm -f $@ && ar rcs $@ $^

$(OUT)/libsooth.so: $(LIB_OBJ)
	@mkdir -p $(@D)
	$(CC) -shared -Wl,-soname,libsooth.so.0 $(LDFLAGS) $^ $(LDLIBS) -o $@
	ln -sf libsooth.so $(@D)/libsooth.so.0

$(OUT)/sooth: $(CLI_OBJ) $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@

$(OUT)/sooth.pc: Makefile
	@mkdir -p $(@D)
	@printf 'prefix=%s\nlibdir=$${prefix}/lib\nincludedir=$${prefix}/include\n\nName: sooth\nDescription: lossless speculative decoding\nVersion: %s\nRequires.private: %s\nLibs: -L$${libdir} -lsooth\nLibs.private: -lm -pthread\nCflags: -I$${includedir}\n' \
	  '$(PREFIX)' '$(VERSION)' '$(PKGS)' > $@

$(OUT)/examples/%: examples/%.c include/sooth.h $(OUT)/libsooth.so
	@mkdir -p $(@D)
	$(CC) -std=c11 $(WARN) -Iinclude $(CFLAGS) $(LDFLAGS) $< -L$(OUT) -lsooth -Wl,-rpath,'$$ORIGIN/..' -o $@

$(O)/tests/%.o: ISA := -Itests/support
$(O)/tests/%: $(O)/tests/%.o $(TEST_LIB_OBJ) $(OUT)/libsooth.a
	$(CC) $(LDFLAGS) $^ -lcmocka $(LDLIBS) -o $@

.PHONY: tests test
tests: all $(TEST_BIN)
test: tests ## unit, golden and statistical tests
	$(PYTHON) tools/run_tests.py $(TEST_BIN)

-include $(shell find $(O) -name '*.d' 2>/dev/null)
