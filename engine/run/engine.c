/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - create, turn, wait, destroy. See engine.h for the thread rules.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"

#define WAIT_MAX_MS 50 /* kvmd wants kvc_dispatch() within 100 ms */

/** eng_rand() - nonces and jitter (splitmix64, seeded by the kernel) */
u64 eng_rand(struct eng_engine *e)
{
	u64 z = (e->rng += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static int take_option(u32 *field, u32 dflt, u32 max, const char *name,
		       struct eng_err *err)
{
	if (*field == 0)
		*field = dflt;
	if (*field > max)
		return eng_refuse(err, -EINVAL, "%s=%u: at most %u", name, *field, max);
	return 0;
}

static int take_options(struct eng_engine *e, const struct eng_options *opt,
			struct eng_err *err)
{
	struct eng_options *o = &e->opt;
	u32 positions = e->m->config.max_positions;
	int rc;

	if (opt && opt->size_bytes != sizeof(*opt))
		return eng_refuse(err, -EINVAL, "options.size_bytes=%u: expected %zu",
				  opt->size_bytes, sizeof(*opt));
	if (opt)
		*o = *opt;
	if (o->kv > ENG_KV_F32)
		return eng_refuse(err, -EINVAL, "kv=%u: unknown", o->kv);
	if (o->attention > ENG_ATTENTION_FAST)
		return eng_refuse(err, -EINVAL, "attention=%u: unknown", o->attention);
	rc = take_option(&o->batch_max, 16, ENG_BATCH_MAX, "batch_max", err);
	if (!rc)
		rc = take_option(&o->chunk_tokens, 256, ENG_CHUNK_MAX, "chunk_tokens",
				 err);
	if (!rc)
		rc = take_option(&o->waiting_max, 256, ENG_WAITING_MAX, "waiting_max",
				 err);
	if (!rc)
		rc = take_option(&o->length_max, positions, positions, "length_max", err);
	if (!rc)
		rc = take_option(&o->admit_ms, 30000, 86400000, "admit_ms", err);
	if (!rc)
		rc = take_option(&o->timeout_ms, 5000, 86400000, "timeout_ms", err);
	e->tokens_max = o->batch_max + o->chunk_tokens;
	e->pages_max = (u32)kv_div_round_up(o->length_max, KV_PAGE_TOKENS);
	return rc;
}

static int open_session(struct eng_engine *e, struct eng_err *err)
{
	struct kvc_options o = {
		.size_bytes = sizeof(o),
		.socket_path = e->opt.socket_path,
		.client_name = e->opt.client_name ? e->opt.client_name : "kv-engine",
		.timeout_ms = e->opt.timeout_ms,
	};
	int rc = kvc_open(&o, &e->kvc);

	if (rc)
		return eng_refuse(err, rc < 0 ? rc : -EPROTO, "kvmd at %s: %s",
				  o.socket_path ? o.socket_path
						: "$KVMD_SOCKET or its default",
				  kvc_strerror(NULL));
	kvc_info(e->kvc, &e->session);
	return 0;
}

static int model_layout(struct eng_engine *e, struct kv_layout *ret,
			const float **ret_scales, struct eng_err *err)
{
	static const u32 dtype[] = {KV_DTYPE_BF16, KV_DTYPE_E4M3, KV_DTYPE_E4M3,
				    KV_DTYPE_F32};
	static const u32 scale[] = {KV_SCALE_NONE, KV_SCALE_TOKEN, KV_SCALE_STATIC,
				    KV_SCALE_NONE};
	struct eng_model with_scales = *e->m;
	int rc;

	if (e->opt.kv_scales) {
		const struct eng_config *c = &e->m->config;

		with_scales.kv_scales = e->opt.kv_scales;
		with_scales.nr_kv_scales = c->arch == ENG_ARCH_MLA
						   ? c->nr_layers
						   : c->nr_layers * c->nr_kv_heads * 2;
	}
	rc = eng_model_layout(&with_scales, dtype[e->opt.kv], scale[e->opt.kv], ret);
	if (rc)
		return eng_refuse(err, rc, "kv=%s: %s", eng_kv_str(e->opt.kv),
				  rc == -ENODATA ? "the model has no KV scales"
						 : strerror(-rc));
	*ret_scales = ret->nr_scales ? with_scales.kv_scales : NULL;
	return 0;
}

/* What the kernels need of the pool beside its pages. */
static int place_pool(struct eng_engine *e, struct eng_err *err)
{
	bool on_gpu = e->pool_info.backend != KV_BACKEND_HOST;
	u32 nr_scales = e->pool_info.layout.nr_scales;
	void *scales = NULL;
	int rc = 0;

	if (on_gpu != (e->opt.device == ENG_DEVICE_CUDA))
		return eng_refuse(err, -ENODEV,
				  "kvmd's pages are on %s, the engine runs on %s",
				  on_gpu ? "a GPU" : "the host", e->mem->ops->name);
	if (nr_scales)
		rc = e->mem->ops->alloc(e->mem, nr_scales * sizeof(float), &scales);
	if (!rc && nr_scales)
		rc = e->mem->ops->load(e->mem, scales, e->pool_info.scales,
				       nr_scales * sizeof(float));
	e->pages.scales = scales;
	if (!rc)
		rc = eng_mirror_alloc(e);
	if (rc)
		return eng_refuse(err, rc, "mirror of %u pages: %s",
				  e->pool_info.geometry.nr_pages, strerror(-rc));
	return 0;
}

static int open_pool(struct eng_engine *e, struct eng_err *err)
{
	struct kv_layout layout;
	const float *scales = NULL;
	const u8 *uuid = e->opt.device == ENG_DEVICE_CUDA ? e->mem->gpu_uuid : NULL;
	int rc;

	rc = model_layout(e, &layout, &scales, err);
	if (rc)
		return rc;
	rc = kvc_pool_open(e->kvc, &layout, scales, uuid, &e->pool);
	if (rc)
		return eng_refuse(err, rc < 0 ? rc : -EPROTO, "pool: %s",
				  kvc_strerror(e->kvc));
	kvc_pool_get_info(e->pool, &e->pool_info);
	e->pages = (struct kvk_pages){
		.base = e->pool_info.base,
		.geometry = e->pool_info.geometry,
		.layout = e->pool_info.layout,
	};
	e->step.block_bytes = kvc_step_block_bytes(e->pool);
	return place_pool(e, err);
}

/* Before the session: weights take long, and kvmd wants to be heard (kvc_dispatch). */
static int open_device(struct eng_engine *e, struct eng_err *err)
{
	int rc = eng_mem_open(e->opt.device, e->opt.gpu_uuid, &e->mem, err);

	if (rc)
		return rc;
	e->ops = e->mem->kernels;
	rc = eng_weights_place(e);
	return rc ? eng_refuse(err, rc, "weights to %s: %s", e->mem->ops->name,
			       strerror(-rc))
		  : 0;
}

/* All buffers, and nothing on its way to them any more. */
static int open_buffers(struct eng_engine *e, struct eng_err *err)
{
	int rc = eng_buffers_alloc(e);

	if (!rc)
		rc = e->mem->ops->sync(e->mem);
	return rc ? eng_refuse(err, rc, "buffers for %u tokens a step: %s", e->tokens_max,
			       strerror(-rc))
		  : 0;
}

int eng_engine_create(struct eng_model *m, const struct eng_options *opt,
		      struct eng_engine **ret, struct eng_err *err)
{
	struct eng_engine *e = calloc(1, sizeof(*e));
	int rc;

	if (!e)
		return eng_refuse(err, -ENOMEM, "out of memory");
	e->m = m;
	e->wake_fd = -1;
	list_init(&e->waiting);
	list_init(&e->running);
	list_init(&e->done);
	if (getrandom(&e->rng, sizeof(e->rng), 0) != sizeof(e->rng))
		e->rng = kv_now_ns();
	rc = take_options(e, opt, err);
	if (rc)
		goto destroy;
	rc = open_device(e, err);
	if (rc)
		goto destroy;
	rc = open_session(e, err);
	if (rc)
		goto destroy;
	rc = open_pool(e, err);
	if (rc)
		goto destroy;
	e->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (e->wake_fd < 0) {
		rc = eng_refuse(err, -errno, "eventfd: %s", strerror(errno));
		goto destroy;
	}
	rc = open_buffers(e, err);
	if (rc)
		goto destroy;
	*ret = e;
	return 0;
destroy:
	eng_engine_destroy(e);
	return rc;
}

static void free_list(struct list_node *head)
{
	while (!list_empty(head))
		eng_request_free(list_first(head, struct eng_request, node));
}

void eng_engine_destroy(struct eng_engine *e)
{
	if (!e)
		return;
	free_list(&e->running);
	free_list(&e->waiting);
	free_list(&e->done);
	if (e->lost)
		return;
	if (e->kvc) {
		kvc_flush(e->kvc);
		kvc_close(e->kvc);
	}
	if (e->wake_fd >= 0)
		close(e->wake_fd);
	if (e->mem) {
		eng_graphs_drop(e);
		e->mem->ops->close(e->mem);
	}
	eng_buffers_free(e);
	free(e->own_layers);
	free(e);
}

/** eng_session_lost() - no lease is ours any more: what runs is computed again */
void eng_session_lost(struct eng_engine *e)
{
	struct eng_request *r;

	list_for_each_entry (r, &e->running, node)
		r->revoked = true;
}

/**
 * eng_session_look() - is this still the session that leases and mirror are of?
 *
 * Any call may have connected again. A new table has a new log, and its words may be lower
 * than those the mirror holds, which would let leases of the old session pass: the mirror
 * starts anew. Leases are gone only if kvmd could not take the session up again.
 *
 * Return: true: it is; false: it was another one, which is taken note of.
 */
bool eng_session_look(struct eng_engine *e)
{
	struct kvc_info now;
	bool same;

	kvc_info(e->kvc, &now);
	if (now.session == e->session.session &&
	    now.table_epoch == e->session.table_epoch)
		return true;
	same = now.session == e->session.session;
	if (now.check_mode != e->session.check_mode)
		eng_graphs_drop(e);
	e->session = now;
	if (eng_mirror_reset(e))
		e->lost = true;
	else if (same)
		return true;
	eng_session_lost(e);
	return false;
}

/**
 * eng_kvmd_away() - would a call to kvmd make the running requests wait?
 *
 * They go on without it, on the pages they hold (design 1, G4). What can be done later or
 * left out (admission, seals, giving pages back) is then not asked for; the next step sees
 * a new kvmd by itself. One that is there and silent costs a call's timeout at most every
 * other timeout.
 */
bool eng_kvmd_away(const struct eng_engine *e)
{
	if (KV_MUTANT(steps_wait_for_kvmd))
		return false;
	return e->away || (e->quiet_until_ns && kv_now_ns() < e->quiet_until_ns);
}

/** eng_kvmd_note() - @rc is what a call to kvmd came to. Return: @rc */
int eng_kvmd_note(struct eng_engine *e, int rc)
{
	e->quiet_until_ns =
		rc == -ETIMEDOUT ? kv_now_ns() + e->opt.timeout_ms * KV_NSEC_PER_MSEC : 0;
	return rc;
}

/** eng_dispatch_event() - callback of kvc_dispatch() */
void eng_dispatch_event(void *arg, const struct kvc_event *event)
{
	struct eng_engine *e = arg;
	struct eng_request *r;

	switch (event->type) {
	case KV_MSG_REVOKE:
		list_for_each_entry (r, &e->running, node) {
			for (u32 i = 0; i < event->nr; i++)
				r->revoked |=
					eng_table_revoke(&r->table, &event->pages[i]);
		}
		break;
	case KV_MSG_EPOCH:
		e->quiet_until_ns = 0;
		eng_session_look(e);
		break;
	default: /* PRESSURE: admission asks kvmd each time; EXTENT_REMOVED: nothing is
		    held */
		break;
	}
}

static void flush_frees(struct eng_engine *e)
{
	int rc;

	if (!e->frees_due && !e->away)
		return;
	if (e->nr_running && e->step.nr_seqs && eng_kvmd_away(e))
		return;
	if (!e->nr_running && kv_now_ns() < e->quiet_until_ns)
		return; /* nothing to do: do not knock all the time */
	/* this connects again, too: kvmd waits for every session of before it was restarted */
	rc = eng_kvmd_note(e, kvc_flush(e->kvc));
	/* what could not be sent is still ours, and charged */
	e->frees_due = rc == KV_BUSY || rc < 0;
}

int eng_engine_turn(struct eng_engine *e)
{
	int rc;

	if (e->lost)
		return -EIO;
	rc = kvc_dispatch(e->kvc, eng_dispatch_event, e);
	if (rc != -EAGAIN)
		e->away = rc == -ECONNRESET;
	e->step.nr_seqs = eng_sched_build(e);
	if (e->step.nr_seqs == 0) {
		flush_frees(e);
		return 0;
	}
	rc = eng_step_run(e);
	flush_frees(e);
	if (rc == KV_BUSY || rc == -ETIMEDOUT) {
		e->retry_ns = kv_now_ns() + KV_NSEC_PER_MSEC;
		return 0;
	}
	return rc < 0 ? rc : (int)e->step.nr_seqs;
}

void eng_engine_wait(struct eng_engine *e, int timeout_ms)
{
	struct pollfd fds[2] = {
		{.fd = kvc_event_fd(e->kvc), .events = POLLIN},
		{.fd = e->wake_fd, .events = POLLIN},
	};
	u64 count;
	int ms = eng_sched_wait_ms(e, timeout_ms);

	if (e->nr_running && (ms < 0 || ms > WAIT_MAX_MS))
		ms = WAIT_MAX_MS;
	if (poll(fds, 2, ms) > 0 && (fds[1].revents & POLLIN) &&
	    read(e->wake_fd, &count, sizeof(count)) < 0)
		return; /* EAGAIN: another wait took it */
}

void eng_engine_wake(struct eng_engine *e)
{
	u64 one = 1;

	if (write(e->wake_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: the counter is full, so a wake is pending */
}

int eng_engine_run(struct eng_engine *e)
{
	while (e->nr_waiting + e->nr_running) {
		int rc = eng_engine_turn(e);

		if (rc < 0)
			return rc;
		if (rc == 0 && e->nr_waiting + e->nr_running)
			eng_engine_wait(e, WAIT_MAX_MS);
	}
	flush_frees(e);
	return 0;
}

void eng_engine_stats(struct eng_engine *e, struct eng_stats *ret)
{
	const u64 *from = (const u64 *)&e->stats;
	u64 *to = (u64 *)ret;

	for (size_t i = 0; i < sizeof(*ret) / sizeof(u64); i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

struct kvc *eng_engine_kvc(struct eng_engine *e)
{
	return e->kvc;
}

struct kvc_pool *eng_engine_pool(struct eng_engine *e)
{
	return e->pool;
}

const struct kv_layout *eng_engine_layout(struct eng_engine *e)
{
	return &e->pool_info.layout;
}

static const char *const kv_names[] = {"bf16", "fp8", "fp8_s", "f32"};
static const char *const attention_names[] = {"exact", "fast"};

static int find_name(const char *const *names, u32 nr, const char *text)
{
	for (u32 i = 0; i < nr; i++) {
		if (!strcmp(text, names[i]))
			return (int)i;
	}
	return -EINVAL;
}

int eng_kv_parse(const char *text)
{
	return find_name(kv_names, KV_ARRAY_SIZE(kv_names), text);
}

const char *eng_kv_str(u32 kv)
{
	return kv < KV_ARRAY_SIZE(kv_names) ? kv_names[kv] : "?";
}

int eng_attention_parse(const char *text)
{
	return find_name(attention_names, KV_ARRAY_SIZE(attention_names), text);
}

const char *eng_attention_str(u32 attention)
{
	return attention < KV_ARRAY_SIZE(attention_names) ? attention_names[attention]
							  : "?";
}
