/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - inputs as files, and without libFuzzer the replay of a corpus. */
#include "tests/fuzz/fuzz.h"

#include "kvmd/ipc/ring.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

const char *fuzz_file(const uint8_t *data, size_t bytes)
{
	static char path[64];
	static int fd = -1;
	size_t done = 0;
	ssize_t n;

	if (fd < 0)
		fd = memfd_create("fuzz", MFD_CLOEXEC);
	FUZZ_CHECK(fd >= 0);
	FUZZ_CHECK(!ftruncate(fd, 0) && !lseek(fd, 0, SEEK_SET));
	while (done < bytes) {
		n = write(fd, data + done, bytes - done);
		FUZZ_CHECK(n > 0);
		done += (size_t)n;
	}
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return path;
}

#ifdef KV_FUZZ
/* Targets that do not look at a ring. */
__attribute__((weak)) void kv_fuzz_loaded(const volatile void *addr)
{
}
#else

#define INPUT_MAX (4u << 20)

static int replay(const char *path)
{
	uint8_t *data = malloc(INPUT_MAX);
	ssize_t n = -1;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (data && fd >= 0)
		n = read(fd, data, INPUT_MAX);
	if (n < 0)
		_exit(9);
	/* its own copy of the right size: a read past the end is seen by ASan */
	data = realloc(data, (size_t)n ? (size_t)n : 1);
	LLVMFuzzerTestOneInput(data, (size_t)n);
	free(data);
	close(fd);
	return 0;
}

/* tests/fuzz/corpus/NAME, here or in a directory above this program. */
static DIR *corpus_open(const char *argv0, char *dir, size_t room)
{
	const char *name = strrchr(argv0, '/') ? strrchr(argv0, '/') + 1 : argv0;
	char up[PATH_MAX] = "tests/../";
	DIR *d;

	for (u32 i = 0; i < 8; i++) {
		if ((size_t)snprintf(dir, room, "%stests/fuzz/corpus/%s", i ? up : "",
				     name) >= room)
			return NULL;
		d = opendir(dir);
		if (d)
			return d;
		if (!i)
			strcpy(up, "../");
		else
			strcat(up, "../");
	}
	return NULL;
}

int main(int argc, char **argv)
{
	u32 nr = 0, failed = 0;
	struct dirent *e;
	char dir[PATH_MAX - 256], path[PATH_MAX];
	DIR *d = corpus_open(argv[0], dir, sizeof(dir));
	int status;

	(void)argc;
	printf("TAP version 13\n");
	while (d && (e = readdir(d)) != NULL) {
		if (e->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
		fflush(stdout);
		if (!fork()) {
			alarm(30);
			exit(replay(path)); /* and what a target leaves goes */
		}
		status = -1;
		wait(&status);
		failed += status != 0;
		printf("%sok %u - %s\n", status ? "not " : "", ++nr, e->d_name);
	}
	if (d)
		closedir(d);
	if (!nr)
		printf("not ok 1 - no corpus\n");
	printf("1..%u\n", nr ? nr : 1);
	return failed || !nr;
}
#endif
