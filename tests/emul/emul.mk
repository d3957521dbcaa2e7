# The page-touching CUDA kernels on the CPU (emul.cc): tests/kernels/cuda_*.c run without a
# GPU, nvcc or the toolkit, whose headers those in tests/emul stand for. x86-64 only.
ifeq ($(shell uname -m),x86_64)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
EMUL_KERNELS := tag_check append norm_rope norm_rope_append page_move ops_cuda
EMUL_TESTS := cuda_pages cuda_families cuda_dense
EMUL_BINS := $(EMUL_TESTS:%=$(O)/tests/emul/%)
EMUL_OBJS := $(patsubst %,$(O)/obj/tests/emul/%.o,emul standins $(EMUL_KERNELS:%=kernels/%))
# the headers of tests/emul come before the toolkit's
EMUL_FLAGS := -Itests/emul -DCONFIG_CUDA
# C's warnings go, and gcc does not know `#pragma unroll`; sums are rounded one by one, as in
# the references; kernels look at the bytes of pages through pointers of many types
EMUL_CXXFLAGS := $(filter-out -std=% -Wstrict-prototypes -Wmissing-prototypes,$(CFLAGS)) \
	-std=c++17 -Wno-unknown-pragmas -ffp-contract=off -fno-strict-aliasing

$(O)/obj/tests/emul/%.o: tests/emul/%.cc $(O)/obj/flags
	$(call say,CXX,$<)
	$(Q)mkdir -p $(@D) && $(CXX) $(EMUL_FLAGS) $(CPPFLAGS) $(EMUL_CXXFLAGS) -MMD -MP -c -o $@ $<

$(O)/obj/tests/emul/kernels/%.o: kernels/%.cu $(O)/obj/flags
	$(call say,CXX,$<)
	$(Q)mkdir -p $(@D) && $(CXX) -x c++ $(EMUL_FLAGS) $(CPPFLAGS) $(EMUL_CXXFLAGS) \
		-MMD -MP -c -o $@ $<

$(O)/obj/tests/emul/%.o: tests/kernels/%.c $(O)/obj/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D) && $(CC) $(EMUL_FLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

# objects first: what they define, the library's table and kernels are not asked for
$(EMUL_BINS): $(O)/tests/emul/%: $(O)/obj/tests/emul/%.o $(O)/obj/tests/kernels/common.o \
		$(EMUL_OBJS) $(O)/libkernels.a
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D) && $(CXX) $(LDFLAGS) -o $@ $^ -fopenmp -lm

TEST_BINS += $(EMUL_BINS)
tests: $(EMUL_BINS)
kernels: $(EMUL_BINS)
include tests/emul/hopper/hopper.mk
endif
