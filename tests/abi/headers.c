/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each ABI header and kvclient.h alone, in every language that includes them; the example
 * client with nothing but -Iinclude and -lkvclient, compiled and run against a kvmd.
 *
 * The source tree is where the build directory's parent says, or $KV_SRC; compilers that
 * are not installed are skipped by name.
 */
#include "tests/kvt.h"

/* This program links no engine; one file of it starts the daemon. */
#include "engine/private.c"

#ifdef KV_SANITIZED
#define SANITIZE "-fsanitize=address,undefined"
#else
#define SANITIZE ""
#endif

static char src[512], build[512];

/* build/tests/abi/headers -> build; the tree is the directory the build was made from. */
static void find_dirs(void)
{
	char exe[512];
	ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);

	KVT_EXPECT(n > 0);
	exe[n] = 0;
	for (int i = 0; i < 3; i++)
		*strrchr(exe, '/') = 0;
	snprintf(build, sizeof(build), "%s", exe);
	for (char *p = exe; p; p = strrchr(exe, '/')) {
		char header[600];

		*p = p == exe ? *p : 0;
		snprintf(header, sizeof(header), "%s/include/kvclient.h", exe);
		if (!access(header, R_OK)) {
			snprintf(src, sizeof(src), "%s", exe);
			return;
		}
	}
	if (!getenv("KV_SRC"))
		KVT_SKIP("no source tree above %s and no $KV_SRC", build);
	snprintf(src, sizeof(src), "%.500s", getenv("KV_SRC"));
}

static bool have(const char *program)
{
	char cmd[600];

	snprintf(cmd, sizeof(cmd), "command -v %s >/dev/null 2>&1", program);
	return system(cmd) == 0;
}

static const char *const headers[] = {
	"kv/types.h",  "kv/abi.h",  "kv/gfp.h",	    "kv/outcome.h", "kv/tag.h",
	"kv/layout.h", "kv/ring.h", "kv/session.h", "kvclient.h",
};

static void compile_each(const char *program, const char *flags)
{
	find_dirs();
	if (!have(program))
		KVT_SKIP("no %s", program);
	for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
		char cmd[2048];

		snprintf(
			cmd, sizeof(cmd),
			"printf '#include \"%s\"\\nint unit;\\n' | %s %s -I%s/include "
			"-c -o /dev/null - 2>&1 | sed 's/^/# /'; test ${PIPESTATUS[1]} = 0",
			headers[i], program, flags, src);
		setenv("KV_CMD", cmd, 1);
		if (system("bash -c \"$KV_CMD\""))
			KVT_FAIL("%s alone does not compile with %s %s", headers[i],
				 program, flags);
	}
}

/* no -Wshadow: C++ takes kvc_info() beside struct kvc_info for a hidden constructor */
#define STRICT "-Wall -Wextra -Wpedantic -Wconversion -Werror -Wno-unused-function"

KVT_TEST(headers_compile_as_c11_with_gcc)
{
	compile_each("gcc", "-xc -std=c11 " STRICT);
}

KVT_TEST(headers_compile_as_c11_with_clang)
{
	compile_each("clang", "-xc -std=c11 " STRICT);
}

KVT_TEST(headers_compile_as_cpp17_with_gcc)
{
	compile_each("g++", "-xc++ -std=c++17 " STRICT);
}

KVT_TEST(headers_compile_as_cpp17_with_clang)
{
	compile_each("clang++", "-xc++ -std=c++17 " STRICT);
}

KVT_TEST_T(headers_compile_as_device_code, 300)
{
	static const char *const nvcc[] = {"nvcc", "/usr/local/cuda/bin/nvcc"};
	const char *found = NULL;
	char cmd[2048];

	find_dirs();
	for (int i = 0; i < 2 && !found; i++)
		if (have(nvcc[i]))
			found = nvcc[i];
	if (!found)
		KVT_SKIP("no nvcc");
	/* one unit: nvcc takes seconds; kv_row_check() must compile for the device */
	snprintf(
		cmd, sizeof(cmd),
		"d=$(mktemp -d) && printf '#include \"kvclient.h\"\\n"
		"__global__ void k(kv_row r, unsigned *o) { *o = kv_row_check(r, 0, 0, 0, 1); }\\n'"
		" > $d/t.cu && %s -std=c++17 -Werror all-warnings -I%s/include -c -o $d/t.o "
		"$d/t.cu 2>&1; r=$?; rm -rf $d; exit $r",
		found, src);
	KVT_EXPECT_EQ(system(cmd), 0);
}

/* ------------------------------------------------------------------------- example
 * client */

static void build_and_run(const char *compiler, const char *flags, const char *libs)
{
	struct eng_private_kvmd d;
	char cmd[4096], out[64], error[512], line[200] = "";
	FILE *f;

	find_dirs();
	if (!have(compiler))
		KVT_SKIP("no %s", compiler);
	snprintf(out, sizeof(out), "/tmp/kvt-example-%d", getpid());
	snprintf(
		cmd, sizeof(cmd),
		"%s %s -Wall -Wextra -Werror -I%s/include %s/docs/example_client.c -o %s "
		"-x none -L%s -Wl,-rpath,%s %s -pthread %s 2>&1 | sed 's/^/# /'; test -x %s",
		compiler, flags, src, src, out, build, build, libs, SANITIZE, out);
	if (system(cmd))
		KVT_FAIL("the example does not compile with %s %s", compiler, flags);
	if (eng_private_kvmd_start(NULL, &d, error, sizeof(error)))
		KVT_FAIL("%s", error);
	setenv("KVMD_SOCKET", d.socket_path, 1);
	f = popen(out, "r");
	KVT_EXPECT(f && fgets(line, sizeof(line), f));
	KVT_EXPECT_EQ(pclose(f), 0);
	KVT_EXPECT_HAS(line, "1 page found");
	unlink(out);
	KVT_EXPECT_EQ(eng_private_kvmd_stop(&d), 0);
}

KVT_TEST(example_compiles_as_c_and_runs)
{
	build_and_run("gcc", "-std=c11 -xc", "-lkvclient");
}

KVT_TEST(example_compiles_as_cpp_and_runs)
{
	build_and_run("g++", "-std=c++17 -xc++", "-lkvclient");
}

KVT_TEST(example_links_the_static_library)
{
	build_and_run("gcc", "-std=c11 -xc", "-l:libkvclient.a");
}

KVT_TEST(example_is_short)
{
	char path[600], line[256];
	int lines = 0;
	FILE *f;

	find_dirs();
	snprintf(path, sizeof(path), "%s/docs/example_client.c", src);
	f = fopen(path, "r");
	while (f && fgets(line, sizeof(line), f))
		lines++;
	KVT_EXPECT(lines > 20);
	KVT_EXPECT_LE(lines, 60);
	fclose(f);
}

/* ------------------------------------------------------------------------- exported
 * names */

KVT_TEST(library_exports_only_the_documented_calls)
{
	char cmd[1600], name[128], header[600], text[800];
	int exported = 0;
	FILE *f;

	find_dirs();
	if (!have("nm"))
		KVT_SKIP("no nm");
	snprintf(header, sizeof(header), "%s/include/kvclient.h", src);
	snprintf(cmd, sizeof(cmd),
		 "nm -D --defined-only %s/libkvclient.so | grep ' T ' | "
		 "sed 's/.* T //; s/@.*//'",
		 build);
	f = popen(cmd, "r");
	while (f && fscanf(f, "%127s", name) == 1) {
		exported++;
		if (strncmp(name, "kvc_", 4))
			KVT_FAIL("%s is exported", name);
		snprintf(text, sizeof(text), "grep -q '%s(' %s", name, header);
		if (system(text))
			KVT_FAIL("%s is exported but not in kvclient.h", name);
	}
	pclose(f);
	snprintf(cmd, sizeof(cmd), "test $(grep -c '^KVC_API' %s) = %d", header,
		 exported);
	if (system(cmd))
		KVT_FAIL("%d names are exported, kvclient.h declares another number",
			 exported);
}

KVT_MAIN()
