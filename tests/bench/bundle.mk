# kvbench-kernels: the GPU kernels' bench, static and stripped, so that it can be copied to a
# machine that has a GPU and a driver and nothing else.
ifeq ($(CONFIG_CUDA),y)
BUNDLE_CU := gpu_bench kernels_main kernels_attn kernels_prefill kernels_moe kernels_moe_check kernels_fp8_loads kernels_int4_loads kernels_layer kernels_dense kernels_pages \
	kernels_pages_case kernels_append kernels_copy kernels_step
BUNDLE_OBJS := $(patsubst %,$(O)/obj/tests/bench/%.cu.o,$(BUNDLE_CU))
nvflags-tests/bench/gpu_bench.cu = -DKVB_COMMIT='"$(KVB_COMMIT)"'
BUNDLE_LIBS := -L$(CUDA_HOME)/lib64 -lcudart_static -static-libstdc++ -static-libgcc \
	-l:libgomp.a -ldl -lrt -lpthread -lm

$(O)/kvbench-kernels: $(BUNDLE_OBJS) $(O)/libkernels.a
	$(call say,LD,$@)
	$(Q)g++ -o $@ $(BUNDLE_OBJS) -Wl,--start-group $(O)/libkernels.a -Wl,--end-group \
		$(BUNDLE_LIBS)
	$(Q)strip $@
endif
