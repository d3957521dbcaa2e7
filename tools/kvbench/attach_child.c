/* SPDX-License-Identifier: Apache-2.0 */
/* attach_child.c - the processes that kvbench attach starts (attach.h). One thread. */
#include "attach.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/cuda_syms.h"

#define OWNER_BATCH 512u
#define OWNER_SPARE 256u /* pages left for those who attach */

struct kv_layout attach_layout(void)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_MLA,
				  .dtype = KV_DTYPE_E4M3,
				  .scale_kind = KV_SCALE_TOKEN,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = 61,
				  .latent_dim = 512,
				  .rope_dim = 64};
}

static int connect_engine(const char *socket_path, const char *name, struct kvc **ret)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = socket_path,
				  .client_name = name,
				  .timeout_ms = 30000};
	int r = kvc_open(&opt, ret);

	return r ? kvb_said("kvc_open", r) : 0;
}

static int report(int fd, const struct attach_times *t)
{
	return write(fd, t, sizeof(*t)) == sizeof(*t) ? 0 : 1;
}

/* ------------------------------------------------------------------------ the owner */

static int fill(struct kvc *c)
{
	struct kv_layout layout = attach_layout();
	static struct kv_grant pages[OWNER_BATCH], spare[OWNER_SPARE];
	struct kvc_pool *pool;
	u32 nr_spare = 0, batch = OWNER_BATCH;
	int r = kvc_pool_open(c, &layout, NULL, NULL, &pool);

	if (r)
		return kvb_said("kvc_pool_open", r);
	while (batch) {
		r = kvc_alloc(pool, batch, KV_GFP_NOWAIT, pages);
		if (r < 0)
			return kvb_said("kvc_alloc", r);
		if (r)
			batch /= 2;
		for (u32 i = 0; !r && i < batch && nr_spare < OWNER_SPARE; i++)
			spare[nr_spare++] = pages[i];
	}
	/* not all of a small pool: then nothing would keep its extents */
	nr_spare /= 2;
	r = kvc_free(pool, spare, nr_spare);
	return r ? kvb_said("kvc_free", r) : kvc_flush(c);
}

int attach_owner(enum kvb_backend b, const char *socket_path, int fd)
{
	struct eng_mem *m;
	struct kvc *c;
	char byte = 1;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (kvb_device_open(b, &m) || connect_engine(socket_path, "kvbench-owner", &c))
		return 1;
	if (fill(c) || write(fd, &byte, 1) != 1)
		return 1;
	for (;;) {
		usleep(20000);
		kvc_dispatch(c, NULL, NULL);
	}
}

/* ------------------------------------------------------------------- driver, context */

struct driver {
	struct kv_cuda_syms cu;
	kv_cu_device dev;
};

/* The driver alone: what a CUDA runtime adds is not kvmd's. */
static int open_driver(enum kvb_backend b, struct driver *d, u64 start_ns,
		       struct attach_times *t)
{
	kv_cu_ctx ctx;

	if (b == KVB_HOST)
		return 0;
	if (kv_cuda_load(&d->cu, NULL, 0) || d->cu.init(0)) {
		fprintf(stderr, "kvbench: attach: no driver\n");
		return -ENODEV;
	}
	t->init = kv_now_ns() - start_ns;
	if (d->cu.device_get(&d->dev, 0) || d->cu.ctx_retain(&ctx, d->dev) ||
	    d->cu.ctx_push(ctx)) {
		fprintf(stderr, "kvbench: attach: no context\n");
		return -ENODEV;
	}
	t->context = kv_now_ns() - start_ns;
	return 0;
}

static int use_page(enum kvb_backend b, struct driver *d, void *page)
{
	u64 in = 0x0123456789abcdefull, out = 0;

	if (b == KVB_HOST) {
		*(volatile u64 *)page = in;
		out = *(volatile u64 *)page;
	} else if (d->cu.copy_in((kv_cu_ptr)(uintptr_t)page, &in, sizeof(in)) ||
		   d->cu.copy_out(&out, (kv_cu_ptr)(uintptr_t)page, sizeof(out))) {
		return -EIO;
	}
	return in == out ? 0 : -EIO;
}

/* ----------------------------------------------------------------------- the library */

static u32 nr_mapped(struct kvc_pool *pool, const struct kvc_pool_info *info)
{
	u32 per = 1u << info->geometry.shift, nr = 0;

	for (u32 pfn = 0; pfn < info->geometry.nr_pages; pfn += per)
		nr += kvc_page_addr(pool, pfn) != NULL;
	return nr;
}

int attach_engine(enum kvb_backend b, const char *socket_path, int fd, u64 start_ns)
{
	struct attach_times t = {.main = kv_now_ns() - start_ns};
	struct kv_layout layout = attach_layout();
	struct kvc_pool_info info;
	struct kvc_pool *pool;
	struct kv_grant page;
	struct driver d;
	struct kvc_step *step;
	struct kv_stat stat;
	struct kvc *c;
	u32 want;
	int r;

	if (open_driver(b, &d, start_ns, &t) ||
	    connect_engine(socket_path, "kvbench-attach", &c))
		return 1;
	t.open = kv_now_ns() - start_ns;
	r = kvc_pool_open(c, &layout, NULL, NULL, &pool);
	if (r)
		return kvb_said("kvc_pool_open", r) != 0;
	t.pool = kv_now_ns() - start_ns;
	r = kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page);
	if (r)
		return kvb_said("kvc_alloc", r) != 0;
	t.first = kv_now_ns() - start_ns;
	r = kvc_step_begin(c, &step);
	if (!r)
		r = use_page(b, &d, kvc_page_addr(pool, page.pfn));
	if (r)
		return kvb_said("first use", r) != 0;
	kvc_step_retire(step);
	t.used = kv_now_ns() - start_ns;
	if (kvc_stat(pool, &stat))
		return 1;
	kvc_pool_get_info(pool, &info);
	want = stat.nr_pages >> info.geometry.shift;
	while (nr_mapped(pool, &info) < want && kv_now_ns() - start_ns < 20000000000ull)
		if (kvc_dispatch(c, NULL, NULL) <= 0)
			usleep(100);
	t.all = kv_now_ns() - start_ns;
	t.nr_extents = nr_mapped(pool, &info);
	t.extent_bytes = info.geometry.extent_bytes;
	t.failed = t.nr_extents < want;
	r = report(fd, &t);
	kvc_close(c);
	return r;
}

/* ---------------------------------------------------------------- the protocol by hand */

struct raw {
	int sock;
	int fds[KV_MSG_FDS_MAX];
	u32 nr_fds;
	union {
		struct kv_msg msg;
		struct kv_msg_hello_reply hello;
		struct kv_msg_pool_reply pool;
		struct kv_msg_extents extents;
		u64 words[KV_MSG_BYTES_MAX / 8];
	} in;
};

static int raw_recv(struct raw *r)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(KV_MSG_FDS_MAX * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = &r->in, .iov_len = sizeof(r->in)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control)};
	struct cmsghdr *cm;

	if (recvmsg(r->sock, &mh, MSG_CMSG_CLOEXEC) <= 0)
		return -ECONNRESET;
	r->nr_fds = 0;
	cm = CMSG_FIRSTHDR(&mh);
	if (cm && cm->cmsg_type == SCM_RIGHTS) {
		r->nr_fds = (u32)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(r->fds, CMSG_DATA(cm), r->nr_fds * sizeof(int));
	}
	return r->in.msg.type;
}

static int raw_connect(struct raw *r, const char *socket_path)
{
	struct kv_msg_hello hello = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_HELLO,
					     .size_bytes = sizeof(hello),
					     .sequence = 1},
				     .abi_min = KV_ABI_VERSION_MIN,
				     .abi_max = KV_ABI_VERSION,
				     .client_name = "kvbench-raw"};
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", socket_path);
	r->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (r->sock < 0 || connect(r->sock, (void *)&addr, sizeof(addr)) ||
	    send(r->sock, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello))
		return -errno;
	return raw_recv(r) == KV_MSG_HELLO_REPLY && !r->in.hello.result ? 0 : -EPROTO;
}

/* Import, map and make accessible what one message brought. */
static int raw_map(struct raw *r, struct driver *d, kv_cu_ptr base, u64 bytes,
		   struct attach_times *t)
{
	const struct kv_cu_access access = {
		.location = {.type = KV_CU_DEVICE, .id = d->dev},
		.flags = KV_CU_READWRITE};

	for (u32 i = 0; i < r->nr_fds; i++) {
		kv_cu_ptr at = base + r->in.extents.extents[i].index * bytes;
		u64 t0 = kv_now_ns(), t1, t2;
		kv_cu_handle handle;

		if (d->cu.mem_import(&handle, (void *)(intptr_t)r->fds[i],
				     KV_CU_POSIX_FD))
			return -EIO;
		t1 = kv_now_ns();
		if (d->cu.mem_map(at, bytes, 0, handle, 0))
			return -EIO;
		t2 = kv_now_ns();
		if (d->cu.mem_access(at, bytes, &access, 1) || d->cu.mem_release(handle))
			return -EIO;
		t->import += t1 - t0;
		t->map += t2 - t1;
		t->access += kv_now_ns() - t2;
		t->nr_extents++;
		close(r->fds[i]);
	}
	return 0;
}

static int raw_pool(struct raw *r, struct driver *d, u64 start_ns, struct attach_times *t)
{
	struct kv_msg_pool_open msg = {.msg = {.magic = KV_MSG_MAGIC,
					       .type = KV_MSG_POOL_OPEN,
					       .size_bytes = sizeof(msg),
					       .sequence = 2},
				       .layout = attach_layout()};
	struct kv_geometry g;
	kv_cu_ptr base = 0;
	u32 want;

	if (send(r->sock, &msg, sizeof(msg), MSG_NOSIGNAL) != sizeof(msg) ||
	    raw_recv(r) != KV_MSG_POOL_REPLY || r->in.pool.result)
		return -EPROTO;
	t->pool = kv_now_ns() - start_ns;
	g = r->in.pool.geometry;
	want = r->in.pool.nr_extents;
	t->extent_bytes = g.extent_bytes;
	if (d->cu.va_reserve(
		    &base, (u64)(g.nr_pages >> g.shift) * g.extent_bytes + g.extent_bytes,
		    0, 0, 0))
		return -ENOMEM;
	while (t->nr_extents < want) {
		int type = raw_recv(r);

		if (type < 0)
			return type;
		if (type != KV_MSG_EXTENT_ADDED)
			continue;
		if (raw_map(r, d, base, g.extent_bytes, t))
			return -EIO;
		if (!t->first)
			t->first = kv_now_ns() - start_ns;
	}
	t->all = kv_now_ns() - start_ns;
	return want ? 0 : -ENODATA;
}

int attach_raw(enum kvb_backend b, const char *socket_path, int fd, u64 start_ns)
{
	struct attach_times t = {.main = kv_now_ns() - start_ns};
	static struct raw r;
	struct driver d;
	int rc;

	if (b == KVB_HOST || open_driver(b, &d, start_ns, &t))
		return 1;
	rc = raw_connect(&r, socket_path);
	t.open = kv_now_ns() - start_ns;
	if (!rc)
		rc = raw_pool(&r, &d, start_ns, &t);
	if (rc) {
		fprintf(stderr, "kvbench: attach: raw client: %s\n", strerror(-rc));
		return 1;
	}
	return report(fd, &t);
}
