/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dbg/tree.h - the daemon's insides as a tree of readable files.
 *
 * A module registers a read callback under a path ("pools/states"); `kvmctl trace --state
 * PATH` prints what it writes. No promise of stability: the stable form is `kvmctl ...
 * --json`.
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_DBG_TREE_H
#define KVD_DBG_TREE_H

#include <stdio.h>

#include "base/util.h"

#define KVD_TREE_NODES_MAX 64u
#define KVD_TREE_PATH_MAX  64u

/**
 * kvd_tree_add() - register a file
 * @path: static string, unique, below KVD_TREE_PATH_MAX bytes
 * @read: writes text to @out
 * @arg: first argument of @read, borrowed until kvd_tree_remove()
 *
 * Return: 0; -ENOSPC; -EEXIST.
 */
int kvd_tree_add(const char *path, void (*read)(void *arg, FILE *out), void *arg);

/** kvd_tree_remove() - take a file out; unknown paths are ignored */
void kvd_tree_remove(const char *path);

/**
 * kvd_tree_read() - write a file's text, or the names below a directory ("" = all)
 *
 * Return: 0; -ENOENT.
 */
int kvd_tree_read(const char *path, FILE *out);

#endif
