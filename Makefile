# kvmd: GPU KV-cache memory daemon
#
#   make               build everything into build/
#   make demo          install what is missing, build, run the main job and show it
#   make check         install what is missing, build, run all tests
#   make check-mutants take out each safety rule and see its test fail
#   make coverage      which branches of the core the tests reach
#   make kernels       only the kernel library and its tests
#   make bundle        one tar with programs and GPU tests for a machine with a driver only
#   REQUIRE_GPU=1 make check   all GPU tests, on the GPU of this machine
#   make help          the rest
#
# Knobs: V=1 commands shown, O=DIR build directory, CC=clang, SAN=1 ASan + UBSan,
#        DEBUG=1, MUTANTS=1 mutant build, CUDA=0 without nvcc, CUDA_ARCHS="90a 80",
#        LINEINFO=1 source lines in GPU code, for ncu and compute-sanitizer
#
# Non-recursive: each directory has a Kbuild that lists its objects in obj-y and
# obj-$(CONFIG_CUDA).

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.SECONDARY:

ifdef FUZZ
O ?= build/fuzz
CC := clang
CUDA := 0
MUTANTS := 1
SAN := 1
else ifdef COV
O ?= build/cov
CUDA := 0
else ifdef MUTANTS
O ?= build/mutants
else ifdef SAN
O ?= build/san
else
O ?= build
endif
ifeq ($(origin CC),default)
CC := gcc
endif
Q := $(if $(V),,@)
say = $(if $(V),,@printf '  %-7s %s\n' $(1) $(2))

# ---------------------------------------------------------------- what is there
NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA ?= $(if $(NVCC),1,0)
CONFIG_CUDA := $(if $(filter 1,$(CUDA)),y)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(NVCC))
CUDA_ARCHS ?= 90a
CONFIG_SDT := $(if $(wildcard /usr/include/sys/sdt.h /usr/include/*-linux-gnu/sys/sdt.h),y)

# ---------------------------------------------------------------- flags
# gcc warns of more at -O0, where it knows less of sizes
WARN := -Wall -Wextra -Werror $(if $(COV),-Wno-format-truncation) -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
	-Wno-unused-parameter -Wvla
# At -O0 a header's static functions are there though nobody calls them; what they refer to is not
OPT := $(if $(DEBUG)$(COV),-O0 -ffunction-sections,-O2)
, := ,
SANFLAGS := $(if $(SAN),-fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer) \
	$(if $(FUZZ),-fsanitize=fuzzer-no-link)
CPPFLAGS := -D_GNU_SOURCE -I. -Iinclude $(if $(MUTANTS),-DKV_MUTANTS) \
	$(if $(CONFIG_CUDA),-DCONFIG_CUDA -I$(CUDA_HOME)/include) $(if $(CONFIG_SDT),-DCONFIG_SDT) \
	$(if $(SAN),-DKV_SANITIZED) $(if $(FUZZ),-DKV_FUZZ) $(if $(COV),-include tests/cov.h)
CFLAGS := -std=gnu11 $(OPT) -g -fPIC -fvisibility=hidden -pthread $(WARN) $(SANFLAGS)
LDFLAGS := -pthread $(SANFLAGS) $(if $(COV),--coverage) $(if $(DEBUG)$(COV),-Wl$(,)--gc-sections) -Wl,-z,relro,-z,now
# Lines are four fifths of the kernels' size in a bundle, and change no instruction
NVFLAGS := -std=c++17 -O3 $(if $(LINEINFO),-lineinfo) -Xcompiler -fPIC,-Wall,-Wextra,-Wno-unused-parameter \
	-Werror all-warnings --expt-relaxed-constexpr -I. -Iinclude -DCONFIG_CUDA \
	$(if $(MUTANTS),-DKV_MUTANTS) \
	$(foreach a,$(CUDA_ARCHS),-gencode=arch=compute_$(a)$(,)code=sm_$(a))
CUDA_LIBS := $(if $(CONFIG_CUDA),-L$(CUDA_HOME)/lib64 -lcudart_static -lstdc++ -ldl -lrt)

# ---------------------------------------------------------------- directories
DIRS := kvmd kvmd/dbg kvmd/backend kvmd/mm kvmd/own kvmd/tier kvmd/keep kvmd/mover kvmd/ipc libkvclient kernels \
	engine engine/model engine/run engine/http \
	tools/kvmctl tools/kvquant tools/kvbench tests/bench tests/sim/world

define load_dir
obj-y :=
obj-main :=
-include $(1)/Kbuild
objs-$(1) := $$(addprefix $$(O)/obj/$(1)/,$$(obj-y))
main-$(1) := $$(addprefix $$(O)/obj/$(1)/,$$(obj-main))
endef
$(foreach d,$(DIRS),$(eval $(call load_dir,$(d))))

KVD_OBJS := $(objs-kvmd) $(objs-kvmd/dbg) $(objs-kvmd/backend) $(objs-kvmd/mm) \
	$(objs-kvmd/own) $(objs-kvmd/tier) $(objs-kvmd/keep) $(objs-kvmd/mover) $(objs-kvmd/ipc)
ENG_OBJS := $(objs-engine) $(objs-engine/model) $(objs-engine/run) $(objs-engine/http)

LIB_KVD := -luring -lcjson -lsodium -ljemalloc -lm
LIB_ENG := -lcjson -lpcre2-8 -lmicrohttpd -lsodium -fopenmp $(CUDA_LIBS) -lm
LIB_KERN := -fopenmp $(CUDA_LIBS) -lm

BINS := $(if $(main-kvmd),$(O)/kvmd) $(if $(main-tools/kvmctl),$(O)/kvmctl) \
	$(if $(main-engine),$(O)/kv-engine) $(if $(main-tools/kvquant),$(O)/kvquant) \
	$(if $(main-tools/kvbench),$(O)/kvbench)
LIBS := $(O)/libkvclient.a $(O)/libkvclient.so

.PHONY: all kernels tests clean help check check-mutants check-long check-layers \
	check-format soak check-cc check-san check-hostile check-fuzz check-fuzz-brief fuzz-targets coverage check-archs \
	coverage-run demo deps install-deps bundle
all: $(BINS) $(LIBS)

$(O)/libkvd.a: $(KVD_OBJS)
$(O)/libkvclient.a: $(objs-libkvclient)
$(O)/libkernels.a: $(objs-kernels)
$(O)/libengine.a: $(ENG_OBJS)
$(O)/libquant.a: $(objs-tools/kvquant)
$(O)/libbench.a: $(objs-tools/kvbench) $(objs-tests/bench)
$(O)/libctl.a: $(objs-tools/kvmctl)
$(O)/libsim.a: $(objs-tests/sim/world)
$(O)/%.a:
	$(call say,AR,$@)
	$(Q)mkdir -p $(@D) && rm -f $@ && ar rcs $@ $(filter %.o,$^)

$(O)/libkvclient.so: $(objs-libkvclient) libkvclient/kvclient.map
	$(call say,LD,$@)
	$(Q)$(CC) -shared $(LDFLAGS) -Wl,-soname,libkvclient.so.1 \
		-Wl,--version-script=libkvclient/kvclient.map -o $@ $(filter %.o,$^)
	$(Q)ln -sf libkvclient.so $@.1

define link
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D) && $(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) \
		-Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(1)
endef

$(O)/kvmd: $(main-kvmd) $(O)/libkvd.a
	$(call link,$(LIB_KVD))
$(O)/kvmctl: $(main-tools/kvmctl) $(O)/libctl.a
	$(call link,-lcjson -lm)
$(O)/kv-engine: $(main-engine) $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a
	$(call link,$(LIB_ENG))
$(O)/kvquant: $(main-tools/kvquant) $(O)/libquant.a $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a
	$(call link,$(LIB_ENG))
$(O)/kvbench: $(main-tools/kvbench) $(O)/libbench.a $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a $(O)/libkvd.a
	$(call link,$(LIB_ENG) $(LIB_KVD))

# ---------------------------------------------------------------- compile
# Objects are made anew when their compiler or a flag of it changes.
$(O)/obj/flags: made_with = $(CC) $(CPPFLAGS) $(CFLAGS)
$(O)/obj/flags-cu: made_with = $(NVCC) $(NVFLAGS)
$(O)/obj/flags $(O)/obj/flags-cu: FORCE
	$(Q)mkdir -p $(@D) && echo '$(made_with)' | cmp -s - $@ || echo '$(made_with)' >$@
.PHONY: FORCE
FORCE:

# What a figure says it was measured with, and what says so is made anew with it.
KVB_COMMIT := $(shell git describe --always --dirty --exclude='*' 2>/dev/null || echo unknown)
$(O)/obj/commit: FORCE
	$(Q)mkdir -p $(@D) && echo '$(KVB_COMMIT)' | cmp -s - $@ || echo '$(KVB_COMMIT)' >$@
$(O)/obj/tests/bench/gpu_bench.cu.o $(O)/obj/tools/kvbench/rank.o \
	$(O)/obj/tools/kvbench/safety.o: $(O)/obj/commit

$(O)/obj/%.o: %.c $(O)/obj/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D) && $(CC) $(CPPFLAGS) $(CFLAGS) $(cflags-$(patsubst %/,%,$(dir $<))) \
		$(cflags-$<) -MMD -MP -c -o $@ $<

$(O)/obj/%.cu.o: %.cu $(O)/obj/flags-cu
	$(call say,NVCC,$<)
	$(Q)mkdir -p $(@D) && $(NVCC) $(NVFLAGS) $(nvflags-$<) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

cflags-kernels := -fopenmp -O3 -fno-math-errno -fno-trapping-math
cflags-engine/run := -fopenmp
cflags-engine/model := -fopenmp -O3 -fno-trapping-math
cflags-tools/kvquant := -fopenmp
# What a request waits for are loops over its pages: an eighth off 100 pages (docs/performance.md)
ifeq ($(DEBUG)$(COV)$(SAN)$(FUZZ),)
$(foreach d,kvmd/mm kvmd/own kvmd/ipc libkvclient,$(eval cflags-$(d) := -O3))
endif

# Only what tools/coverage reports on: each process writes its counters when it ends.
ifdef COV
$(foreach d,kvmd/mm kvmd/own kvmd/ipc kvmd/keep,$(eval cflags-$(d) += --coverage -fprofile-update=atomic))
endif

-include $(shell find $(O) -name '*.d' 2>/dev/null)

# ---------------------------------------------------------------- tests
# A test program is one .c file; its directory says what it links.
TEST_DIRS := tests/unit/mm tests/unit/own tests/unit/tier tests/unit/keep tests/unit/ipc tests/unit/model tests/unit/client \
	tests/unit/tools tests/abi tests/fuzz tests/kernels tests/ipc tests/fault tests/e2e tests/sim
TEST_SRCS := $(filter-out %/common.c %/common_raw.c,$(wildcard $(addsuffix /*.c,$(TEST_DIRS))))
TEST_BINS := $(patsubst %.c,$(O)/%,$(TEST_SRCS))
ifeq ($(REQUIRE_GPU),1)
TESTS ?= $(GPU_TESTS)
RUN_JOBS := -j 4
else
TESTS ?= $(TEST_BINS)
endif

tlib-tests/unit/mm := $(O)/libkvd.a
tlib-tests/unit/own := $(O)/libkvd.a
tlib-tests/unit/tier := $(O)/libkvd.a
tlib-tests/unit/keep := $(O)/libkvd.a
tlib-tests/unit/ipc := $(O)/libkvd.a
tlib-tests/unit/client := $(O)/libkvclient.a
tlib-tests/unit/model := $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a
tlib-tests/unit/tools := $(O)/libquant.a $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a
tlib-tests/abi := $(O)/libkvclient.a
tlib-tests/fuzz := $(O)/libkvd.a $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a
tlib-tests/kernels := $(O)/libkernels.a
tlib-tests/ipc := $(O)/libkvclient.a $(O)/libkernels.a
tlib-tests/fault := $(O)/libkvd.a $(O)/libkvclient.a
tlib-tests/e2e := $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a
tlib-tests/sim := $(O)/libsim.a $(O)/libkvd.a
tsys-tests/unit/mm := $(LIB_KVD) -lm
tsys-tests/unit/own := $(LIB_KVD) -lm
tsys-tests/unit/tier := $(LIB_KVD) -lm
tsys-tests/unit/keep := $(LIB_KVD) -lm
tsys-tests/unit/ipc := $(LIB_KVD) -lm
tsys-tests/unit/client := -lm
tsys-tests/unit/model := $(LIB_ENG)
tsys-tests/unit/tools := $(LIB_ENG)
tsys-tests/abi := -lm
tsys-tests/fuzz := $(LIB_KVD) $(LIB_ENG) $(if $(FUZZ),-fsanitize=fuzzer)
tsys-tests/kernels := $(LIB_KERN)
tsys-tests/ipc := $(LIB_KERN) -lsodium
tsys-tests/fault := $(LIB_KVD) -lm
tsys-tests/e2e := $(LIB_ENG)
# The core's heap, its abort() and its death are the simulator's
tsys-tests/sim := $(LIB_KVD) $(addprefix -Wl$(,)--wrap=,malloc calloc free abort kvd_crash_now)

define test_rule
$(O)/$(1)/%: $(O)/obj/$(1)/%.o $(tlib-$(1)) $(patsubst %.c,$(O)/obj/%.o,$(wildcard $(1)/common.c $(1)/common_raw.c))
	$$(call say,LD,$$@)
	$$(Q)mkdir -p $$(@D) && $$(CC) $$(LDFLAGS) -o $$@ $$(filter %.o,$$^) -Wl,--start-group $$(filter %.a,$$^) \
		-Wl,--end-group $$(tsys-$(1))
endef
$(foreach d,$(TEST_DIRS),$(eval $(call test_rule,$(d))))

# What these tests put between an engine and its library
$(O)/tests/e2e/away: tsys-tests/e2e += $(addprefix -Wl$(,)--wrap=,kvc_step_begin kvc_alloc kvc_seal kvc_lookup kvc_flush \
	kvc_pool_attach_locked pthread_mutex_trylock)

$(O)/tests/unit/model/table: tsys-tests/unit/model += $(addprefix -Wl$(,)--wrap=,kvc_alloc kvc_free kvc_lookup kvc_fork)
$(O)/tests/unit/model/job: tsys-tests/unit/model += $(addprefix -Wl$(,)--wrap=,eng_request_submit \
	eng_request_result eng_request_free eng_request_abort eng_request_stop kvc_prefetch kvc_info realloc \
	clock_gettime)

# The tiers' tests stand on the core's made-up surroundings
$(filter $(O)/tests/unit/tier/%,$(TEST_BINS)): $(O)/obj/tests/unit/own/common.o

# A driver in memfds and its NVML, which tests load in place of the real ones, and an
# allocator that aborts
FAKES := $(addprefix $(O)/tests/fake/lib,cuda.so nvml.so noalloc.so)
$(FAKES): $(O)/tests/fake/lib%.so: $(O)/obj/tests/fake/%.o
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D) && $(CC) -shared $(LDFLAGS) -Wl,-z,nodelete -o $@ $(filter %.o,$^)
$(O)/tests/fake/libcuda.so: $(O)/obj/tests/fake/cuda_copy.o
$(filter $(O)/tests/fault/% $(O)/tests/ipc/% $(O)/tests/unit/client/% \
	$(O)/tests/unit/tools/%,$(TEST_BINS)): | $(FAKES)

# The matrix of attacks is one program of several files.
HOSTILE_OBJS := $(patsubst %.c,$(O)/obj/%.o,$(wildcard tests/hostile/*.c tests/ipc/common*.c))
$(O)/tests/hostile/matrix: $(HOSTILE_OBJS) $(O)/libkvclient.a $(O)/libkernels.a $(O)/libengine.a
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D) && $(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) \
		-Wl,--end-group $(LIB_ENG)
TEST_BINS += $(O)/tests/hostile/matrix

$(O)/tests/run: $(O)/obj/tests/run.o
	$(call link,)

tests: all $(TEST_BINS) $(O)/tests/run
kernels: $(O)/libkernels.a $(filter $(O)/tests/kernels/%,$(TEST_BINS)) $(O)/tests/run

-include tests/bench/bundle.mk
-include tests/bench/gpu.mk
-include tests/emul/emul.mk

# ---------------------------------------------------------------- checks
check: deps
	$(Q)$(MAKE) --no-print-directory check-run

# Scripts that print TAP are tests like any other.
SCRIPT_TESTS := $(if $(filter 1,$(REQUIRE_GPU)),,tests/model/check.sh tools/check-layers \
	tools/check-tour tools/check-safety tools/check-operations \
	tools/check-man) tests/e2e/demo.py

check-run: tests
	$(Q)rm -rf $(O)/tap
	$(Q)KV_BUILD=$(abspath $(O)) $(O)/tests/run $(RUN_JOBS) $(O)/tap $(TESTS) $(SCRIPT_TESTS)

check-mutants: deps
	$(Q)$(MAKE) --no-print-directory MUTANTS=1 tests
	$(Q)KV_BUILD=$(abspath build/mutants) tools/check-mutants build/mutants

# The other compiler, and no CUDA: everything must still build.
check-cc:
	$(Q)$(MAKE) --no-print-directory CC=clang O=build/clang tests
	$(Q)$(MAKE) --no-print-directory CUDA=0 O=build/nocuda tests

# The kernels for GPUs without Hopper's instructions: they must compile there; nobody runs them.
OTHER_ARCHS ?= 80 89 100
check-archs:
	$(Q)set -e; $(foreach a,$(OTHER_ARCHS),$(MAKE) --no-print-directory CUDA_ARCHS=$(a) O=$(O)/archs/$(a) \
		$(O)/archs/$(a)/libkernels.a;) echo "compiled for sm_ $(OTHER_ARCHS)"

# All tests under ASan and UBSan, without CUDA.
check-san: deps
	$(Q)$(MAKE) --no-print-directory SAN=1 CUDA=0 O=build/san tests
	$(Q)rm -rf build/san/tap
	$(Q)KV_BUILD=$(abspath build/san) build/san/tests/run build/san/tap $(patsubst $(O)/%,build/san/%,$(TESTS))

# What takes minutes: every crash point, a million simulated schedules, every model, other GPUs.
check-long: tests
	$(if $(filter y,$(CONFIG_CUDA)),$(Q)$(MAKE) --no-print-directory check-archs)
	$(Q)KV_BUILD=$(abspath $(O)) KVT_LONG=1 KVT_TIMEOUT_S=1800 $(O)/tests/ipc/restart_crash killed_at_any_store
	$(Q)$(O)/tests/sim/sim --long 1000000
	$(Q)tests/model/check.sh long
	$(Q)KVT_LONG=1 $(O)/tests/unit/client/litmus
	$(Q)$(O)/kvbench restarts --kills 1000
	$(Q)$(O)/kvbench crashes --kills 10000

# Engines, kvmd, keeper and mover are killed at random, bits flip.
SECONDS ?= 1800
soak: all
	$(Q)$(O)/kvbench soak --seconds $(SECONDS)

check-hostile: all $(O)/tests/hostile/matrix
	$(Q)KV_BUILD=$(abspath $(O)) $(O)/tests/hostile/matrix --timing

# Each fuzz target for FUZZ_SECONDS, and each planted bug until it is found (clang).
check-fuzz: deps
	$(Q)$(MAKE) --no-print-directory FUZZ=1 fuzz-targets
	$(Q)tools/check-fuzz build/fuzz

# Branches of the page state machine, the ring's consumer and recovery that tests reach.
COV_TESTS := $(filter-out %/bench,$(filter $(addprefix $(O)/tests/,unit/mm/% unit/own/% \
	unit/tier/% unit/keep/% unit/ipc/% ipc/% fault/% fuzz/% sim/%),$(TEST_BINS)))
coverage: deps
	$(Q)$(MAKE) --no-print-directory COV=1 coverage-run

coverage-run: $(O)/kvmd $(O)/kvmctl $(O)/kvbench $(COV_TESTS) $(O)/tests/run
	$(Q)find $(O)/obj -name '*.gcda' -delete
	$(Q)rm -rf $(O)/tap
	$(Q)KV_BUILD=$(abspath $(O)) $(O)/tests/run $(RUN_JOBS) $(O)/tap $(COV_TESTS) || \
		echo "unoptimised and counted, cases that measure time may fail"
	$(Q)tools/coverage $(O)

# Two seconds of each target, where clang has libFuzzer: what CI runs.
check-fuzz-brief: deps
	$(Q)if echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' | \
		clang -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null; then \
		$(MAKE) --no-print-directory FUZZ=1 fuzz-targets && \
		FUZZ_SECONDS=2 FUZZ_PLANTED=0 tools/check-fuzz build/fuzz; \
	else echo "fuzzers not run: no clang with libFuzzer"; fi

fuzz-targets: $(filter $(O)/tests/fuzz/%,$(TEST_BINS))

check-model: deps
	$(Q)tools/check-model

check-layers:
	$(Q)tools/check-layers

# include/ is set by hand: its comments are tables
check-format:
	$(Q)git ls-files '*.c' '*.h' '*.cu' '*.cuh' | grep -v '^include/' | xargs clang-format --dry-run -Werror

demo: deps
	$(Q)$(MAKE) --no-print-directory $(if $(MUTANT),MUTANTS=1) all
	$(Q)KV_BUILD=$(if $(MUTANT),build/mutants,$(O)) KV_MUTANT=$(MUTANT) \
		KV_DEMO_JSON=$(O)/demo.json tools/demo

deps install-deps:
	$(Q)tools/install-deps

clean:
	$(Q)rm -rf build

help:
	$(Q)sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile
