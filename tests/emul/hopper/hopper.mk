# Kernels written for Hopper on the CPU (machine.cc): moe.c runs the experts, linear.c linear for
# few tokens, sample.c the samplers, attn.c, attn_data.c and attn_reg.c decode attention, engine.c that of an engine, without a GPU, nvcc or the toolkit. Included by ../emul.mk; x86-64 only.
HOPPER_KERNELS := moe_int4 moe_int4_step moe_int4_g32 moe_int4_g64 moe_int4_g128 moe_plan moe_plain \
	moe_fp8_chunk moe_fp8_step moe_int4_wide moe_int4_wide_g32 moe_int4_wide_g64 moe_int4_wide_g128 moe_fp8_wide \
	linear_few linear_mid linear_fp8 linear_tiled
HOPPER_SAMPLERS := sample sample_wide
HOPPER_ATTN := attn_plan attn_gqa attn_mla attn_mla_tile attn_mla_reg attn_mla_fast
HOPPER_BINS := $(addprefix $(O)/tests/emul/hopper/,moe linear sample attn attn_data attn_reg engine)
hopper_objs = $(patsubst %,$(O)/obj/tests/emul/hopper/%.o,machine $(1:%=kernels/%))
HOPPER_FLAGS := -Itests/emul/hopper -DCONFIG_CUDA
HOPPER_CXXFLAGS := $(EMUL_CXXFLAGS) -Wno-unused-parameter -Wno-sign-compare \
	-Wno-unused-local-typedefs -Wno-pass-failed -Wno-psabi -include tests/emul/hopper/ptx.h

# attn_gqa.cu's ring goes on behind its array, in the struct's next member
$(HOPPER_ATTN:%=$(O)/obj/tests/emul/hopper/kernels/%.o) $(O)/obj/tests/emul/hopper/attn_rest.o: \
		HOPPER_CXXFLAGS += -Wno-unknown-warning-option -Wno-maybe-uninitialized \
			$(if $(SAN),-fno-sanitize=bounds) \
			-include tests/emul/hopper/attn_ptx.h

$(patsubst %,$(O)/obj/tests/emul/hopper/%.o,machine bench_ref attn_rest): \
		$(O)/obj/tests/emul/hopper/%.o: tests/emul/hopper/%.cc $(O)/obj/flags
	$(call say,CXX,$<)
	$(Q)mkdir -p $(@D) && $(CXX) $(HOPPER_FLAGS) $(CPPFLAGS) $(HOPPER_CXXFLAGS) -MMD -MP -c -o $@ $<

$(O)/obj/tests/emul/hopper/kernels/%.o: kernels/%.cu $(O)/obj/flags
	$(call say,CXX,$<)
	$(Q)mkdir -p $(@D) && $(CXX) -x c++ $(HOPPER_FLAGS) $(CPPFLAGS) $(HOPPER_CXXFLAGS) \
		-MMD -MP -c -o $@ $<

$(O)/obj/tests/emul/hopper/%.o: tests/emul/hopper/%.c $(O)/obj/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D) && $(CC) $(HOPPER_FLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(O)/tests/emul/hopper/moe $(O)/tests/emul/hopper/linear: $(O)/obj/tests/emul/hopper/bench_ref.o $(call hopper_objs,$(HOPPER_KERNELS))
$(O)/tests/emul/hopper/sample: $(call hopper_objs,$(HOPPER_SAMPLERS))
$(O)/tests/emul/hopper/attn $(O)/tests/emul/hopper/attn_data $(O)/tests/emul/hopper/attn_reg $(O)/tests/emul/hopper/engine: $(O)/obj/tests/emul/hopper/attn_rest.o $(call hopper_objs,$(HOPPER_ATTN))
$(O)/tests/emul/hopper/engine: $(O)/obj/tests/e2e/common.o $(O)/libengine.a $(O)/libkvclient.a
$(O)/tests/emul/hopper/engine: HOPPER_LIBS := -lcjson -lpcre2-8 -lmicrohttpd -lsodium
$(HOPPER_BINS): $(O)/tests/emul/hopper/%: $(O)/obj/tests/emul/hopper/%.o $(O)/obj/tests/kernels/common.o \
		$(O)/libkernels.a
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D) && $(CXX) $(LDFLAGS) -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group \
		$(HOPPER_LIBS) -fopenmp -lm

TEST_BINS += $(HOPPER_BINS)
tests: $(HOPPER_BINS)
