/* SPDX-License-Identifier: Apache-2.0 */
/*
 * modeldir.h - model directories for tests: copies of the two models with one thing
 * wrong.
 *
 * A copy is a temporary directory of symbolic links; a file is replaced when it is
 * edited. md_remove() deletes it; a failed case leaves its directory for a look.
 */
#ifndef TESTS_MODELDIR_H
#define TESTS_MODELDIR_H

#include <cjson/cJSON.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <sys/stat.h>
#include "tests/kvt.h"

#define MD_MODELS "tests/models"

__attribute__((format(printf, 1, 2), unused)) static char *md_path(const char *fmt, ...)
{
	static char ring[8][PATH_MAX];
	static int next;
	char *p = ring[next++ % 8];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(p, PATH_MAX, fmt, ap);
	va_end(ap);
	return p;
}

/* The absolute name of tests/models/@name, found from the working directory upwards. */
__attribute__((unused)) static const char *md_model(const char *name)
{
	static char path[PATH_MAX];
	char up[64] = "";

	for (int i = 0; i < 6; i++, strcat(up, "../"))
		if (realpath(md_path("%s%s/%s", up, MD_MODELS, name), path))
			return path;
	KVT_FAIL("no %s/%s above the working directory", MD_MODELS, name);
}

__attribute__((unused)) static char *md_temp(void)
{
	char *p = md_path("/tmp/kvt-model-XXXXXX");

	if (!mkdtemp(p))
		KVT_FAIL("mkdtemp %s: %s", p, strerror(errno));
	return strdup(p);
}

__attribute__((unused)) static void md_remove(char *dir)
{
	DIR *d = opendir(dir);
	struct dirent *e;

	while (d && (e = readdir(d))) {
		char *p = md_path("%s/%s", dir, e->d_name);

		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		if (unlink(p) && errno == EISDIR)
			md_remove(strdup(p));
	}
	if (d)
		closedir(d);
	rmdir(dir);
	free(dir);
}

/* A directory of links to all files of a model. */
__attribute__((unused)) static char *md_clone(const char *model)
{
	char *to = md_temp(), *from = strdup(md_model(model));
	DIR *d = opendir(from);
	struct dirent *e;

	KVT_EXPECT(d);
	while ((e = readdir(d)))
		if (e->d_name[0] != '.')
			KVT_EXPECT_EQ(symlink(md_path("%s/%s", from, e->d_name),
					      md_path("%s/%s", to, e->d_name)),
				      0);
	closedir(d);
	free(from);
	return to;
}

__attribute__((unused)) static char *md_read(const char *path, size_t *ret_bytes)
{
	FILE *f = fopen(path, "rb");
	char *text;
	long n;

	if (!f)
		KVT_FAIL("%s: %s", path, strerror(errno));
	fseek(f, 0, SEEK_END);
	n = ftell(f);
	rewind(f);
	text = malloc((size_t)n + 1);
	KVT_EXPECT(text && fread(text, 1, (size_t)n, f) == (size_t)n);
	text[n] = 0;
	fclose(f);
	*ret_bytes = (size_t)n;
	return text;
}

/* Replaces a link or file. */
__attribute__((unused)) static void md_write(const char *path, const void *bytes,
					     size_t nr)
{
	FILE *f;

	unlink(path);
	f = fopen(path, "wb");
	if (!f || fwrite(bytes, 1, nr, f) != nr)
		KVT_FAIL("%s: %s", path, strerror(errno));
	fclose(f);
}

/* Sets a dotted field of @root to the JSON @value; NULL deletes it. */
__attribute__((unused)) static void md_set(cJSON *root, const char *field,
					   const char *value)
{
	char name[256];
	const char *dot;
	cJSON *v;

	for (; (dot = strchr(field, '.')); field = dot + 1) {
		snprintf(name, sizeof(name), "%.*s", (int)(dot - field), field);
		root = cJSON_GetObjectItemCaseSensitive(root, name);
		KVT_EXPECT(root);
	}
	cJSON_DeleteItemFromObjectCaseSensitive(root, field);
	if (!value)
		return;
	v = cJSON_Parse(value);
	KVT_EXPECT(v);
	cJSON_AddItemToObject(root, field, v);
}

__attribute__((unused)) static void md_edit(const char *dir, const char *file,
					    const char *field, const char *value)
{
	char *path = strdup(md_path("%s/%s", dir, file)), *text;
	size_t bytes;
	cJSON *root;

	text = md_read(path, &bytes);
	root = cJSON_Parse(text);
	KVT_EXPECT(root);
	md_set(root, field, value);
	free(text);
	text = cJSON_Print(root);
	md_write(path, text, strlen(text));
	free(text);
	free(path);
	cJSON_Delete(root);
}

/* A safetensors file: header length, header, @nr_data bytes. */
__attribute__((unused)) static void md_write_shard(const char *path,
						   unsigned long long claim,
						   const char *header, const void *data,
						   size_t nr_data)
{
	size_t n = strlen(header);
	char *raw = malloc(8 + n + nr_data + 1);

	KVT_EXPECT(raw);
	for (int i = 0; i < 8; i++)
		raw[i] = (char)(claim >> (8 * i));
	memcpy(raw + 8, header, n);
	if (nr_data)
		memcpy(raw + 8 + n, data, nr_data);
	md_write(path, raw, 8 + n + nr_data);
	free(raw);
}

/* Lets @edit change a shard's header; data stay. */
__attribute__((unused)) static void md_edit_shard(const char *dir, const char *file,
						  void (*edit)(cJSON *header, void *arg),
						  void *arg)
{
	char *path = strdup(md_path("%s/%s", dir, file)), *raw, *text;
	unsigned long long n = 0;
	size_t bytes;
	cJSON *root;

	raw = md_read(path, &bytes);
	for (int i = 0; i < 8; i++)
		n |= (unsigned long long)(unsigned char)raw[i] << (8 * i);
	root = cJSON_ParseWithLength(raw + 8, n);
	KVT_EXPECT(root);
	edit(root, arg);
	text = cJSON_PrintUnformatted(root);
	md_write_shard(path, strlen(text), text, raw + 8 + n, bytes - 8 - n);
	free(text);
	free(raw);
	free(path);
	cJSON_Delete(root);
}

#endif
