/* SPDX-License-Identifier: Apache-2.0 */
/*
 * list.h - circular doubly linked list, embedded in the objects it links.
 *
 * A node that is on no list points to itself, so that list_empty() answers for nodes too.
 */
#ifndef BASE_LIST_H
#define BASE_LIST_H

#include <stdbool.h>
#include "util.h"

struct list_node {
	struct list_node *next, *prev;
};

static inline void list_init(struct list_node *n)
{
	n->next = n;
	n->prev = n;
}

static inline bool list_empty(const struct list_node *head)
{
	return head->next == head;
}

static inline void list_insert_between(struct list_node *n, struct list_node *prev,
				       struct list_node *next)
{
	n->prev = prev;
	n->next = next;
	prev->next = n;
	next->prev = n;
}

static inline void list_add(struct list_node *head, struct list_node *n)
{
	list_insert_between(n, head, head->next);
}

static inline void list_add_tail(struct list_node *head, struct list_node *n)
{
	list_insert_between(n, head->prev, head);
}

static inline void list_del(struct list_node *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

#define list_entry(ptr, type, member) kv_container_of(ptr, type, member)
#define list_first(head, type, member)                                                   \
	(list_empty(head) ? NULL : list_entry((head)->next, type, member))
#define list_for_each_entry(pos, head, member)                                           \
	for (pos = list_entry((head)->next, __typeof__(*pos), member);                   \
	     &pos->member != (head);                                                     \
	     pos = list_entry(pos->member.next, __typeof__(*pos), member))
/* The current entry may be deleted. */
#define list_for_each_entry_safe(pos, tmp, head, member)                                 \
	for (pos = list_entry((head)->next, __typeof__(*pos), member),                   \
	    tmp = list_entry(pos->member.next, __typeof__(*pos), member);                \
	     &pos->member != (head);                                                     \
	     pos = tmp, tmp = list_entry(tmp->member.next, __typeof__(*tmp), member))

#endif
