/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake.h - looking into the fake driver that this process has loaded.
 *
 * Header only: the driver is a shared library found by KV_CUDA_LIB, so that a test asks
 * the very copy that the code under test uses.
 */
#ifndef TESTS_FAKE_H
#define TESTS_FAKE_H

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"

/**
 * struct fake_cuda_counts - what is open in this process
 * @handles: created or imported and not released
 * @mapped, @mapped_bytes: cuMemMap less cuMemUnmap
 * @imports: ever
 * @contexts: open ones
 * @reserved_bytes: of addresses
 */
struct fake_cuda_counts {
	unsigned handles;
	unsigned mapped;
	unsigned imports;
	unsigned contexts;
	u64 reserved_bytes;
	u64 mapped_bytes;
};

/** struct fake_pins - host memory that this process has registered, in pieces */
struct fake_pins {
	unsigned nr;
	unsigned out_of_order; /* unregistered while a later piece was there */
	u64 bytes;
	u64 largest;
};

/* build/tests/KIND/program -> build/tests/fake/@name, into the environment as @var */
static inline int fake_use(const char *var, const char *name)
{
	char path[4096];
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
	char *cut = NULL;

	if (n <= 0)
		return -1;
	path[n] = 0;
	for (char *p = path; (p = strstr(p, "/tests/")); p++)
		cut = p;
	if (!cut)
		return -1;
	strcpy(cut, "/tests/fake/");
	strcat(cut, name);
	return setenv(var, path, 1);
}

static inline int fake_counts(struct fake_cuda_counts *ret)
{
	void *lib = dlopen(getenv("KV_CUDA_LIB"), RTLD_NOW | RTLD_NOLOAD);
	void (*get)(struct fake_cuda_counts *);

	memset(ret, 0, sizeof(*ret));
	if (!lib)
		return -1;
	*(void **)&get = dlsym(lib, "fake_cuda_get");
	if (get)
		get(ret);
	dlclose(lib);
	return get ? 0 : -1;
}

#endif
