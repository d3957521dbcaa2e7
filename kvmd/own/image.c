/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/image.c - entries of the image: filled first, made valid by one store. See image.h.
 *
 * Loop thread only.
 */
#include "kvmd/own/image.h"
#include <stdio.h>
#include <string.h>

/* Never 0, which says unused. */
static u64 check_of(const void *entry, size_t bytes)
{
	return kvd_check_bytes(entry, bytes) | 1;
}

static void in_order(void)
{
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	kvd_crash_point();
}

void kvd_image_format(struct kvd_image *image)
{
	image->version = KVD_IMAGE_VERSION;
	image->next_client_id = 1;
	in_order();
	image->magic = KVD_IMAGE_MAGIC;
}

bool kvd_image_whole(const struct kvd_image *image, u64 bytes)
{
	return bytes >= sizeof(*image) && image->magic == KVD_IMAGE_MAGIC &&
	       image->version == KVD_IMAGE_VERSION;
}

bool kvd_image_domain_ok(const struct kvd_image_domain *d)
{
	return d->check == check_of(d, offsetof(struct kvd_image_domain, check));
}

bool kvd_image_tenant_ok(const struct kvd_image_tenant *t)
{
	return t->check == check_of(t, offsetof(struct kvd_image_tenant, check));
}

bool kvd_image_session_ok(const struct kvd_image_session *s)
{
	return s->check == check_of(s, offsetof(struct kvd_image_session, check));
}

void kvd_image_domain_set(struct kvd_image *image, u32 id, const char *name)
{
	struct kvd_image_domain *d;

	if (!image)
		return;
	d = &image->domains[id];
	if (name && kvd_image_domain_ok(d) && !strcmp(d->name, name))
		return; /* adopted */
	d->check = 0;
	in_order();
	memset(d->name, 0, sizeof(d->name));
	if (!name)
		return;
	snprintf(d->name, sizeof(d->name), "%s", name);
	in_order();
	d->check = check_of(d, offsetof(struct kvd_image_domain, check));
}

void kvd_image_tenant_set(struct kvd_image *image, u32 index, u32 domain,
			  const char *name)
{
	struct kvd_image_tenant *t;

	if (!image)
		return;
	t = &image->tenants[index];
	if (name && kvd_image_tenant_ok(t) && t->domain == domain &&
	    !strcmp(t->name, name))
		return;
	t->check = 0;
	in_order();
	memset(t->name, 0, sizeof(t->name));
	t->domain = domain;
	if (!name)
		return;
	snprintf(t->name, sizeof(t->name), "%s", name);
	in_order();
	t->check = check_of(t, offsetof(struct kvd_image_tenant, check));
}

struct kvd_image_session *kvd_image_session_get(struct kvd_image *image,
						const struct kvd_image_session *from)
{
	struct kvd_image_session *s = image->sessions;

	while (s < image->sessions + KVD_IMAGE_SESSIONS && s->state != KVD_IMAGE_FREE)
		s++;
	if (s == image->sessions + KVD_IMAGE_SESSIONS)
		return NULL;
	memset(s, 0, sizeof(*s));
	memcpy(s, from, offsetof(struct kvd_image_session, check));
	s->check = check_of(s, offsetof(struct kvd_image_session, check));
	in_order();
	s->state = KVD_IMAGE_LIVE;
	in_order();
	return s;
}
