/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/tier/common.c - see common.h */
#include "tests/unit/tier/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

static char dir[64];
static int dir_fd = -1;

static void scratch_empty(const char *path)
{
	DIR *d = opendir(path);
	struct dirent *e;
	char name[512];

	while (d && (e = readdir(d))) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
		if (unlink(name) && errno == EISDIR)
			scratch_empty(name);
	}
	if (d)
		closedir(d);
	rmdir(path);
}

void scratch_begin(const char *base)
{
	snprintf(dir, sizeof(dir), "%s/kvmd-tier-XXXXXX",
		 access(base, W_OK) ? "/tmp" : base);
	KVT_EXPECT(mkdtemp(dir));
}

void scratch_end(void)
{
	scratch_empty(dir);
}

const char *scratch(const char *name)
{
	static char path[4][256];
	static pid_t mine;
	static u32 at;

	if (mine != getpid()) { /* each case has its own */
		mine = getpid();
		snprintf(dir + strlen(dir), sizeof(dir) - strlen(dir), "/%d", mine);
		KVT_EXPECT(!mkdir(dir, 0700));
	}
	at = (at + 1) % 4;
	snprintf(path[at], sizeof(path[at]), "%s/%s", dir, name);
	return path[at];
}

int scratch_fd(void)
{
	if (dir_fd < 0) {
		scratch("");
		dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	}
	KVT_EXPECT(dir_fd >= 0);
	return dir_fd;
}

u8 *file_read(const char *name, size_t *ret_bytes)
{
	FILE *f = fopen(scratch(name), "rb");
	u8 *data;
	long n;

	if (!f)
		return NULL;
	fseek(f, 0, SEEK_END);
	n = ftell(f);
	rewind(f);
	data = malloc((size_t)n + 1);
	KVT_EXPECT(data && fread(data, 1, (size_t)n, f) == (size_t)n);
	fclose(f);
	*ret_bytes = (size_t)n;
	return data;
}

void file_write(const char *name, const void *data, size_t bytes)
{
	int fd = open(scratch(name), O_WRONLY | O_CREAT | O_TRUNC, 0600);

	KVT_EXPECT(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
	close(fd);
}
