/* SPDX-License-Identifier: Apache-2.0 */
/* dbg/tree.c - see tree.h. */
#include "kvmd/dbg/tree.h"

#include <errno.h>
#include <string.h>

static struct tree_node {
	const char *path;
	void (*read)(void *arg, FILE *out);
	void *arg;
} nodes[KVD_TREE_NODES_MAX];
static u32 nr_nodes;

static struct tree_node *node_find(const char *path)
{
	u32 i;

	for (i = 0; i < nr_nodes; i++)
		if (!strcmp(nodes[i].path, path))
			return &nodes[i];
	return NULL;
}

int kvd_tree_add(const char *path, void (*read)(void *arg, FILE *out), void *arg)
{
	if (node_find(path))
		return -EEXIST;
	if (nr_nodes == KVD_TREE_NODES_MAX)
		return -ENOSPC;
	nodes[nr_nodes++] = (struct tree_node){.path = path, .read = read, .arg = arg};
	return 0;
}

void kvd_tree_remove(const char *path)
{
	struct tree_node *node = node_find(path);

	if (node)
		*node = nodes[--nr_nodes];
}

int kvd_tree_read(const char *path, FILE *out)
{
	struct tree_node *node = node_find(path);
	size_t len = strlen(path);
	u32 i, listed = 0;

	if (node) {
		node->read(node->arg, out);
		return 0;
	}
	for (i = 0; i < nr_nodes; i++) {
		const char *p = nodes[i].path;

		if (len && (strncmp(p, path, len) || p[len] != '/'))
			continue;
		fprintf(out, "%s\n", p);
		listed++;
	}
	return listed ? 0 : -ENOENT;
}
