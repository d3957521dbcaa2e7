# What runs on a GPU machine, and one tar of it for machines with a driver and nothing else.
#
#   make bundle                  $(O)/kvmd-gpu.tar.xz: programs, all GPU tests, `check`, `sanitize`
#   REQUIRE_GPU=1 make check     the same tests from the tree, on a machine that can build
#
# All test programs are one file with many names (hard links): they share the kernels. Static
# libraries where the system has them; the other libraries travel in lib/.

GPU_TESTS := $(patsubst %.c,$(O)/%,$(wildcard tests/kernels/cuda_*.c tests/kernels/*_cuda.c \
	tests/ipc/cuda_*.c) tests/e2e/cuda.c tests/e2e/device.c $(wildcard tests/e2e/cuda_*.c))

ifeq ($(CONFIG_CUDA),y)
# 1: 4.5 MB in 5 s of a CPU; 6: 3.9 MB in 50 s. Programs that share kernels lie within the dictionary
BUNDLE_XZ ?= 1
GB := $(O)/bundle/kvmd-gpu
# what the GPU tests start is there as well; not away, whose --wrap would be everybody's
GB_TESTS := $(sort $(GPU_TESTS) $(patsubst %.c,$(O)/%,$(filter-out %/common.c %/common_raw.c %/bench.c %/away.c,\
	$(wildcard tests/ipc/*.c tests/e2e/*.c))))
GB_MAINS := $(GB_TESTS:$(O)/tests/%=$(O)/bundle/obj/%.o)
GB_COMMON := $(patsubst %,$(O)/obj/tests/%.o,kernels/common ipc/common ipc/common_raw e2e/common)
GB_PROGS := kvmd kvmctl kv-engine kvquant kvbench kvbench-kernels

gb_lib = $(if $(wildcard $(addsuffix /lib$(1).a,/usr/lib/*-linux-gnu /usr/lib /usr/lib64)),-l:lib$(1).a,-l$(1))
GB_LIBS := $(call gb_lib,sodium) $(call gb_lib,microhttpd) $(call gb_lib,pcre2-8) \
	$(call gb_lib,uring) $(call gb_lib,jemalloc_pic) $(call gb_lib,cjson) -l:libgomp.a \
	-L$(CUDA_HOME)/lib64 -lcudart_static -static-libstdc++ -static-libgcc -ldl -lrt -lpthread -lm
# only what the machine with the driver may lack
GB_RPATH := -Wl,-rpath,'$$ORIGIN/lib:$$ORIGIN/../../lib'

# HTTP without TLS is all that kv-engine asks of libmicrohttpd; its archive wants GnuTLS,
# which has no archive that links alone. Who called into it would stop here; the library
# itself calls gnutls_global_init() when it is loaded.
$(O)/bundle/no_tls.o:
	$(Q)mkdir -p $(@D) && nm -u $$($(CC) -print-file-name=libmicrohttpd.a) 2>/dev/null | \
		sed -n -e 's/^ *U \(gnutls_global_[a-z0-9_]*\)$$/int \1(void) { return 0; }/p;t' \
		-e 's/^ *U \(gnutls_[a-z0-9_]*\)$$/void \1(void) { __builtin_trap(); }/p' | \
		sort -u | $(CC) -x c -w -O2 -fPIC -c -o $@ -

define gb_link
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D) && g++ $(LDFLAGS) $(GB_RPATH) -s -o $@ $(filter %.o,$^) -Wl,--gc-sections \
		-Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(GB_LIBS)
endef

gb_engine := $(O)/libengine.a $(O)/libkernels.a $(O)/libkvclient.a $(O)/bundle/no_tls.o
$(GB)/kvmd: $(main-kvmd) $(O)/libkvd.a
	$(gb_link)
$(GB)/kvmctl: $(main-tools/kvmctl) $(O)/libctl.a
	$(gb_link)
$(GB)/kv-engine: $(main-engine) $(gb_engine)
	$(gb_link)
$(GB)/kvquant: $(main-tools/kvquant) $(O)/libquant.a $(gb_engine)
	$(gb_link)
$(GB)/kvbench: $(main-tools/kvbench) $(O)/libbench.a $(gb_engine) $(O)/libkvd.a
	$(gb_link)
$(GB)/kvbench-kernels: $(O)/kvbench-kernels
	$(Q)mkdir -p $(@D) && cp $< $@
$(GB)/tests/run: $(O)/obj/tests/run.o
	$(gb_link)
$(GB)/tests/fake/%.so: $(O)/tests/fake/%.so
	$(Q)mkdir -p $(@D) && cp $< $@ && strip $@

# tests/ipc/ops.c's main() becomes main_ipc_ops()
$(O)/bundle/obj/%.o: $(O)/obj/tests/%.o
	$(Q)mkdir -p $(@D) && objcopy --redefine-sym main=main_$(subst /,_,$*) $< $@

$(O)/bundle/names.h: FORCE
	$(Q)mkdir -p $(@D) && printf 'TEST(%s, %s)\n' $(foreach t,$(GB_TESTS:$(O)/tests/%=%),$(subst /, ,$(t))) \
		>$@.new && { cmp -s $@.new $@ || mv $@.new $@; }; rm -f $@.new
$(O)/bundle/many.o: tests/bench/many.c $(O)/bundle/names.h
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -I$(O)/bundle -c -o $@ $<
$(GB)/tests/many: $(O)/bundle/many.o $(GB_MAINS) $(GB_COMMON) $(gb_engine)
	$(gb_link)

GB_FILES := $(addprefix $(GB)/,$(GB_PROGS) tests/run tests/many tests/fake/libcuda.so \
	tests/fake/libnvml.so)

bundle: $(O)/kvmd-gpu.tar.xz
$(O)/kvmd-gpu.tar.xz: $(GB_FILES) tests/bench/check.sh tests/bench/sanitize.sh tests/bench/counters.py tools/demo tools/check-mutants tests/mutants.txt
	$(Q)for t in $(GB_TESTS:$(O)/%=%); do mkdir -p $(GB)/$${t%/*} && ln -f $(GB)/tests/many $(GB)/$$t; done
	$(Q)install -m 755 tests/bench/check.sh $(GB)/check
	$(Q)install -m 755 tests/bench/sanitize.sh $(GB)/sanitize
	$(Q)install -m 755 tests/bench/counters.py $(GB)/counters
	$(Q)cp tests/bench/racecheck.known $(GB)/ && rm -f $(GB)/lineinfo $(if $(LINEINFO),&& touch $(GB)/lineinfo)
	$(Q)printf '%s\n' $(patsubst $(O)/%,%,$(GPU_TESTS)) >$(GB)/gpu-tests
	$(Q)rm -rf $(GB)/lib && mkdir -p $(GB)/lib $(GB)/tools && cp tools/demo tools/check-mutants $(GB)/tools/
	$(Q)cp tests/mutants.txt $(GB)/tests/
	$(Q)ldd $(GB)/kvmd $(GB)/kvmctl $(GB)/kv-engine $(GB)/tests/many | \
		awk '$$3 ~ /^\// && $$1 !~ /^(libc|libm|libpthread|libdl|librt)\./ {print $$3}' | sort -u | \
		xargs -r cp -L -t $(GB)/lib
	$(Q)tar -C $(O)/bundle --sort=name --owner=0 --group=0 --mtime=@0 -cf - kvmd-gpu | \
		xz -T1 --lzma2=preset=$(BUNDLE_XZ),dict=64MiB >$@
	@ls -l $@ | awk '{printf "  %s: %.2f MB\n", $$NF, $$5 / 1e6}'
else
bundle:
	@echo "bundle: needs nvcc, the compiler of the CUDA toolkit" >&2; exit 1
endif
