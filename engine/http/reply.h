/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reply.h - bodies of answers: JSON objects as OpenAI's API has them, and OpenMetrics
 * text. All return a malloc'd string, NULL when out of memory.
 */
#ifndef ENG_HTTP_REPLY_H
#define ENG_HTTP_REPLY_H

#include <time.h>
#include "engine/http/params.h"

/**
 * struct eng_reply_head - what every object of one completion repeats
 */
struct eng_reply_head {
	char id[40];
	time_t created;
	const char *model;
};

/**
 * struct eng_reply_end - how a completion ended, copied from its job
 */
struct eng_reply_end {
	enum eng_finish finish;
	int code;
	u32 nr_prompt;
	u32 nr_cached;
	u32 nr_tokens;
	u32 bad_bits;
	char error[256];
};

char *eng_reply_error(const struct eng_api_error *err);

/** eng_reply_end_error() - does this end need an error object? Fills @ret if so */
bool eng_reply_end_error(const struct eng_reply_end *end, struct eng_api_error *ret);

/** eng_reply_completion() - the whole answer of a request that does not stream; its text may
 * hold NUL */
char *eng_reply_completion(const struct eng_reply_head *h, const char *text,
			   size_t nr_bytes, const struct eng_reply_end *end);

/** eng_reply_chunk() - one server-sent event; @end NULL: more follows; its text may hold NUL */
char *eng_reply_chunk(const struct eng_reply_head *h, const char *text, size_t nr_bytes,
		      const struct eng_reply_end *end);

/** eng_reply_usage() - the event that include_usage asks for */
char *eng_reply_usage(const struct eng_reply_head *h, const struct eng_reply_end *end);

char *eng_reply_models(const char *model, time_t created);
char *eng_reply_metrics(const struct eng_stats *st, const char *model,
			const char *attention, u32 http_active);

#endif /* ENG_HTTP_REPLY_H */
