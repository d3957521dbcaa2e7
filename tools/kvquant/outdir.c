/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outdir.c - all or nothing on disk (kvquant.h).
 *
 * The target must not exist, whatever it is, and must not lie in the input: so no name of
 * ours can reach a file of the input, by symbolic link or otherwise. Files are made in a
 * fresh directory beside the target, synced, and renamed without replacing.
 */
#include "tools/kvquant/kvquant.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/mutant.h"

/* @path without trailing slashes. */
static int clean_path(const char *path, char *ret, size_t size, struct eng_err *err)
{
	size_t n = strlen(path);

	while (n > 1 && path[n - 1] == '/')
		n--;
	if (!n || n + sizeof(".tmp-XXXXXX") > size)
		return eng_refuse(err, -EINVAL, "--out: \"%.100s\" is empty or too long",
				  path);
	memcpy(ret, path, n);
	ret[n] = 0;
	return 0;
}

/* Directory part of a clean path. */
static void parent_of(const char *path, char *ret, size_t size)
{
	const char *slash = strrchr(path, '/');

	if (!slash)
		snprintf(ret, size, ".");
	else
		snprintf(ret, size, "%.*s", slash == path ? 1 : (int)(slash - path),
			 path);
}

static int refuse_target(const struct kvq_options *o, const char *out,
			 struct eng_err *err)
{
	char parent[PATH_MAX], real_parent[PATH_MAX], real_model[PATH_MAX];
	struct stat st, model;
	size_t n;

	if (!realpath(o->model, real_model) || stat(o->model, &model))
		return eng_refuse(err, -errno, "--model: %s: %s", o->model,
				  strerror(errno));
	if (!lstat(out, &st) && !KV_MUTANT(quant_overwrite)) {
		if (!stat(out, &st) && st.st_dev == model.st_dev &&
		    st.st_ino == model.st_ino)
			return eng_refuse(err, -EINVAL,
					  "--out: %s is the input directory", out);
		return eng_refuse(err, -EEXIST,
				  "--out: %s exists; nothing is ever written over", out);
	}
	parent_of(out, parent, sizeof(parent));
	if (!realpath(parent, real_parent))
		return eng_refuse(err, -errno, "--out: %s: %s", parent, strerror(errno));
	n = strlen(real_model);
	if (!strncmp(real_parent, real_model, n) &&
	    (real_parent[n] == '/' || !real_parent[n]) && !KV_MUTANT(quant_inside))
		return eng_refuse(err, -EINVAL,
				  "--out: %s lies inside the input directory %s", out,
				  o->model);
	return 0;
}

int kvq_outdir_create(const struct kvq_options *o, struct kvq_outdir *ret,
		      struct eng_err *err)
{
	struct kvq_outdir d = {.fd = -1};
	char out[sizeof(d.path)];
	mode_t mask;
	int r;

	r = clean_path(o->out, out, sizeof(out), err);
	r = r ?: refuse_target(o, out, err);
	if (r)
		return r;
	memcpy(d.path, out, strlen(out));
	strcpy(d.path + strlen(out), ".tmp-XXXXXX");
	if (!mkdtemp(d.path))
		return eng_refuse(err, -errno, "--out: %s: %s", d.path, strerror(errno));
	d.fd = open(d.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (d.fd < 0) {
		r = -errno;
		rmdir(d.path);
		return eng_refuse(err, r, "--out: %s: %s", d.path, strerror(-r));
	}
	mask = umask(0);
	umask(mask);
	fchmod(d.fd, 0777 & ~mask);
	*ret = d;
	return 0;
}

static int rename_new(const char *from, const char *to)
{
	struct stat st;

	if (!renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE))
		return 0;
	if (errno != EINVAL && errno != ENOSYS)
		return -errno;
	/* a file system without the flag: the check is as close as it gets */
	if (!lstat(to, &st))
		return -EEXIST;
	return rename(from, to) ? -errno : 0;
}

int kvq_outdir_commit(const struct kvq_options *o, struct kvq_outdir *d,
		      struct eng_err *err)
{
	char out[sizeof(d->path)], parent[sizeof(d->path)];
	int fd, r;

	r = clean_path(o->out, out, sizeof(out), err);
	if (r)
		return r;
	if (fsync(d->fd))
		return eng_refuse(err, -errno, "%s: sync: %s", d->path, strerror(errno));
	r = rename_new(d->path, out);
	if (r)
		return eng_refuse(err, r, "--out: %s: %s", out, strerror(-r));
	close(d->fd);
	d->fd = -1;
	parent_of(out, parent, sizeof(parent));
	fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd >= 0) {
		fsync(fd);
		close(fd);
	}
	return 0;
}

void kvq_outdir_remove(struct kvq_outdir *d)
{
	int fd = d->fd < 0 ? -1 : dup(d->fd);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *e;

	while (dir && (e = readdir(dir)))
		if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
			unlinkat(d->fd, e->d_name, 0);
	if (dir)
		closedir(dir);
	if (d->fd >= 0) {
		close(d->fd);
		rmdir(d->path);
	}
	d->fd = -1;
}
