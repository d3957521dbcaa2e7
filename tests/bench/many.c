/* SPDX-License-Identifier: Apache-2.0 */
/*
 * many.c - main() of the bundle's test programs, which are one file with many names: the
 * last two parts of the path that it was started by say which program it is.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define TEST(dir, name) int main_##dir##_##name(int argc, char **argv);
#include "names.h"
#undef TEST

static const struct {
	const char *path;
	int (*main)(int argc, char **argv);
} programs[] = {
#define TEST(dir, name) {"/" #dir "/" #name, main_##dir##_##name},
#include "names.h"
#undef TEST
};

int main(int argc, char **argv)
{
	char exe[4096];
	ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);

	exe[n > 0 ? n : 0] = 0;
	for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++) {
		size_t len = strlen(programs[i].path);

		if (n >= (ssize_t)len && !strcmp(exe + n - len, programs[i].path))
			return programs[i].main(argc, argv);
	}
	fprintf(stderr, "%s: not the name of a test program\n", exe);
	return 2;
}
