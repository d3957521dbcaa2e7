/* SPDX-License-Identifier: Apache-2.0 */
/* mm_python.c - the peer of kvbench mm that is written in Python, run beside it. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvbench/mm.h"

/* tests/bench/block_pool.py in a directory above this program. */
static int script_find(char *path, size_t room)
{
	static const char name[] = "tests/bench/block_pool.py";
	char dir[512], *slash;
	ssize_t n = readlink("/proc/self/exe", dir, sizeof(dir) - 1);

	if (n < 0)
		return -errno;
	dir[n] = 0;
	while ((slash = strrchr(dir, '/')) != NULL) {
		*slash = 0;
		if ((size_t)snprintf(path, room, "%s/%s", dir, name) < room &&
		    !access(path, R_OK))
			return 0;
	}
	return -ENOENT;
}

int kvb_mm_python(struct kvb_dist *ret_pool, struct kvb_dist *ret_chain)
{
	char path[600], command[640], name[32];
	struct kvb_dist d;
	int seen = 0, r;
	FILE *f;

	*ret_pool = *ret_chain = (struct kvb_dist){.p50 = NAN, .p99 = NAN, .mean = NAN};
	r = script_find(path, sizeof(path));
	if (r)
		return r;
	snprintf(command, sizeof(command), "exec python3 '%s' 2>/dev/null", path);
	f = popen(command, "r");
	if (!f)
		return -errno;
	while (fscanf(f, "%31s %lf %lf %lf %u", name, &d.p50, &d.p99, &d.mean, &d.nr) ==
	       5) {
		seen++;
		if (!strcmp(name, "block_pool"))
			*ret_pool = d;
		else if (!strcmp(name, "sha256_chain"))
			*ret_chain = d;
	}
	return pclose(f) || seen != 2 ? -EIO : 0;
}
