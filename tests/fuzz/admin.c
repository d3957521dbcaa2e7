/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any line on the admin socket, to a kvmd that has a pool with pages in most states:
 * answered by one JSON object that says ok, or a code and why; a dry run changes no page;
 * and the audit is clean afterwards.
 *
 * The input is text, or, where it begins with a byte above 0x7f, a list of choices that make
 * requests of known names and values.
 */
#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "tests/fuzz/fuzz.h"

#define PAGES	   6u
#define LINES_MAX  24u
#define LINE_BYTES 1024u

static struct kvd kvd;
static char dir[64];
static int client = -1;

/* ------------------------------------------------------------------------- a daemon */

static void clean_up(void)
{
	DIR *d = opendir(dir);
	struct dirent *e;
	char path[400];

	while (d && (e = readdir(d))) {
		snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
		unlink(path);
	}
	if (d)
		closedir(d);
	rmdir(dir);
}

/* kvmd takes what is there; what it sends back is dropped with its descriptors. */
static void settle(void)
{
	char drop[4096];

	for (u32 i = 0; i < 3; i++) {
		kvd.core_next_ns = 0; /* do not sleep */
		FUZZ_CHECK(!kvd_turn(&kvd));
	}
	while (recv(client, drop, sizeof(drop), MSG_DONTWAIT) > 0)
		;
}

static struct kvd_session *client_open(void)
{
	struct kv_msg_hello hello = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_HELLO,
					     .size_bytes = sizeof(hello)},
				     .abi_min = KV_ABI_VERSION_MIN,
				     .abi_max = KV_ABI_VERSION,
				     .client_name = "fuzz"};
	struct kv_msg_pool_open open_it = {.msg = {.magic = KV_MSG_MAGIC,
						   .type = KV_MSG_POOL_OPEN,
						   .size_bytes = sizeof(open_it)},
					   .layout = {.format_version = KV_LAYOUT_VERSION,
						      .kind = KV_LAYOUT_MLA,
						      .dtype = KV_DTYPE_BF16,
						      .page_tokens = KV_PAGE_TOKENS,
						      .nr_layers = 1,
						      .latent_dim = 512,
						      .rope_dim = 64}};
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	memcpy(addr.sun_path, kvd.opt.socket_path, sizeof(addr.sun_path));
	client = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	FUZZ_CHECK(!connect(client, (struct sockaddr *)&addr, sizeof(addr)));
	settle();
	FUZZ_CHECK(send(client, &hello, sizeof(hello), 0) == sizeof(hello));
	settle();
	FUZZ_CHECK(send(client, &open_it, sizeof(open_it), 0) == sizeof(open_it));
	settle();
	FUZZ_CHECK(kvd.core.nr_sessions == 1 && kvd.core.mm.pools[0]);
	return kv_container_of(kvd.core.sessions.next, struct kvd_session, node);
}

/* ACTIVE, SEALED, CACHED. */
static void pages_make(struct kvd_session *s)
{
	struct kvd_attach *a = kvd_session_attach(s, 1);
	static u32 tokens[4 * KV_PAGE_TOKENS];
	struct kv_seal_page sp[4];
	struct kv_seal_ret rets[4];
	struct kvd_seal_op op = {
		.s = s, .a = a, .pages = sp, .tokens = tokens, .rets = rets, .nr = 4};
	struct kv_grant g[PAGES];
	u32 nr, first, pending;
	int r;

	op.arg.flags = KV_SEAL_ROOT;
	FUZZ_CHECK(!kvd_lease_alloc(s, a, PAGES, KV_GFP_PREFILL, g, &pending));
	for (u32 i = 0; i < 4; i++)
		sp[i] = (struct kv_seal_page){.pfn = g[i].pfn, .tag = g[i].tag};
	FUZZ_CHECK(!kvd_seal_start(&op));
	do {
		r = kvd_seal_step(&op);
	} while (r == -EAGAIN);
	FUZZ_CHECK(!r);
	settle();
	for (u32 i = 2; i < 4; i++) {
		struct kv_page_ref ref = {.pfn = g[i].pfn, .tag = g[i].tag};

		FUZZ_CHECK(!kvd_lease_free(s, a, &ref, 1, &nr, &first));
	}
}

static void daemon_start(void)
{
	struct kvd_options opt = {.check = -1,
				  .socket_mode = 0600,
				  .host_bytes = 16u << 20,
				  .force_epoll = true,
				  .ready_fd = -1};
	char error[KVD_CONFIG_ERROR_BYTES] = "";

	if (!dir[0]) {
		snprintf(dir, sizeof(dir), "%s/kvt-fuzz-XXXXXX", fuzz_tmp());
		FUZZ_CHECK(mkdtemp(dir));
		atexit(clean_up);
		kvd_log_setup(STDERR_FILENO, KVD_LOG_ERR);
	}
	snprintf(opt.socket_path, sizeof(opt.socket_path), "%s/kvmd.sock", dir);
	snprintf(opt.admin_path, sizeof(opt.admin_path), "%s/admin.sock", dir);
	snprintf(opt.state_dir, sizeof(opt.state_dir), "%s", dir);
	memset(&kvd, 0, sizeof(kvd));
	if (kvd_init(&kvd, &opt, error)) {
		fprintf(stderr, "%s\n", error);
		abort();
	}
	pages_make(client_open());
}

/* ------------------------------------------------------------------------- requests */

static const char *const verbs[] = {
	"status", "ps",	     "pages",	"page",	    "pool",    "tenant", "incidents",
	"audit",  "evict",   "version", "reload",   "stat",    "trace",	 "fault",
	"events", "upgrade", "meminfo", "slabinfo", "vmstat",  "pin",	 "unpin",
	"drain",  "limit",   "revoke",	"pressure", "pagemap", "tier",	 "nothing"};
static const char *const fields[] = {
	"pool",	     "pfn",	"target",   "name", "tenant",	 "dry_run",
	"revoke",    "session", "limit",    "from", "min_bytes", "high_bytes",
	"max_bytes", "weight",	"revision", "off",  "state",	 "spec",
	"domain",    "all",	"fail_nth", "more"};
static const char *const values[] = {
	"true",	      "false",	     "null",	"0",	    "1",	  "2",
	"3",	      "5",	     "227",	"-1",	    "4294967295", "4294967296",
	"1e300",      "0.5",	     "1048576", "\"page\"", "\"pool\"",	  "\"domain\"",
	"\"tenant\"", "\"default\"", "\"\"",	"[]",	    "{}",	  "\"pools\""};

static size_t make_line(struct fuzz_in *in, char *line)
{
	size_t used = (size_t)snprintf(line, LINE_BYTES, "{\"op\":\"%s\"",
				       verbs[fuzz_u8(in) % KV_ARRAY_SIZE(verbs)]);
	u32 nr = fuzz_u8(in) % 8;

	for (u32 i = 0; i < nr; i++) {
		u32 field = fuzz_u8(in) % KV_ARRAY_SIZE(fields);
		u32 value = fuzz_u8(in) % KV_ARRAY_SIZE(values);

		used += (size_t)snprintf(line + used, LINE_BYTES - used, ",\"%s\":%s",
					 fields[field], values[value]);
	}
	return used + (size_t)snprintf(line + used, LINE_BYTES - used, "}");
}

static bool changes_pages(const cJSON *request)
{
	static const char *const of[] = {"evict", "pin",   "unpin",
					 "drain", "limit", "revoke"};
	const cJSON *op = cJSON_GetObjectItemCaseSensitive(request, "op");

	for (u32 i = 0; i < KV_ARRAY_SIZE(of); i++)
		if (cJSON_IsString(op) && !strcmp(op->valuestring, of[i]))
			return true;
	return false;
}

/* All that an operator may change. */
struct picture {
	u32 nr[KVD_FRAME_STATES];
	struct kvd_frame frames[2 * PAGES];
	u32 nr_sessions;
	u64 limits[3];
	bool draining;
};

static void picture_take(struct picture *p)
{
	const struct kvd_pool *pool = kvd.core.mm.pools[0];
	const struct kvd_account *t = &kvd.core.tenants[0]->account;

	memset(p, 0, sizeof(*p));
	if (pool) {
		memcpy(p->nr, pool->nr, sizeof(p->nr));
		memcpy(p->frames, pool->frames, sizeof(p->frames));
	}
	p->nr_sessions = kvd.core.nr_sessions - kvd.core.nr_ended;
	p->limits[0] = t->min_bytes;
	p->limits[1] = t->high_bytes;
	p->limits[2] = t->max_bytes;
	p->draining = t->draining;
}

static void check_reply(const cJSON *reply)
{
	const cJSON *ok = cJSON_GetObjectItemCaseSensitive(reply, "ok");
	const cJSON *code = cJSON_GetObjectItemCaseSensitive(reply, "code");
	const cJSON *error = cJSON_GetObjectItemCaseSensitive(reply, "error");
	char *text;

	FUZZ_CHECK(cJSON_IsBool(ok));
	if (cJSON_IsFalse(ok))
		FUZZ_CHECK(cJSON_IsNumber(code) && code->valuedouble != 0 &&
			   cJSON_IsString(error) && error->valuestring[0]);
	text = cJSON_PrintUnformatted(reply);
	FUZZ_CHECK(text && !strchr(text, '\n'));
	cJSON_free(text);
}

static void ask(const char *line, size_t bytes)
{
	cJSON *request = cJSON_ParseWithLength(line, bytes), *reply;
	bool stream = false, dry;
	struct picture before, after;

	if (!cJSON_IsObject(request)) {
		cJSON_Delete(request);
		return;
	}
	dry = changes_pages(request) &&
	      cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(request, "dry_run"));
	picture_take(&before);
	reply = kvd_admin_handle(&kvd, request, &stream);
	FUZZ_CHECK(reply);
	check_reply(reply);
	if (dry || !cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "ok"))) {
		picture_take(&after);
		FUZZ_CHECK(!memcmp(&before, &after, sizeof(before)));
	}
	cJSON_Delete(reply);
	cJSON_Delete(request);
}

static void ask_text(const uint8_t *data, size_t bytes)
{
	for (u32 i = 0; i < LINES_MAX && bytes; i++) {
		const uint8_t *end = memchr(data, '\n', bytes);
		size_t len = end ? (size_t)(end - data) : bytes;

		ask((const char *)data, len);
		data += len;
		bytes -= len;
		if (end) {
			data++;
			bytes--;
		}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = KV_ARRAY_SIZE(list)};
	char line[LINE_BYTES];

	daemon_start();
	if (bytes && data[0] < 0x80)
		ask_text(data, bytes);
	else
		for (u32 i = 0; i < LINES_MAX && in.left > 1; i++)
			ask(line, make_line(&in, line));
	FUZZ_CHECK(!kvd_audit(&kvd.core, &fs));
	settle();
	FUZZ_CHECK(!kvd_audit(&kvd.core, &fs));
	kvd_fini(&kvd);
	close(client);
	return 0;
}
