/* SPDX-License-Identifier: Apache-2.0 */
/*
 * params.h - the body of POST /v1/completions, checked field by field.
 */
#ifndef ENG_HTTP_PARAMS_H
#define ENG_HTTP_PARAMS_H

#include "engine/http/job.h"

/**
 * struct eng_api_error - an OpenAI error object
 * @status: HTTP status
 * @type: "invalid_request_error", "server_error", ...
 * @param: the field that is wrong; empty = none
 * @code: machine-readable; empty = none
 * @message: one line that names field and value
 */
struct eng_api_error {
	unsigned int status;
	const char *type;
	char param[64];
	char code[32];
	char message[384];
};

/**
 * eng_params_parse() - JSON body to a checked request
 * @body: nr_bytes, NUL-terminated
 * @model_name: name under which the model is served
 * @m: its tokenizer and vocabulary
 * @ret: owner of ids and stops; eng_job_params_free()
 * @err: filled when refused
 *
 * Fields: model, prompt (a string or token ids), max_tokens, temperature, top_p, seed,
 * stop, ignore_eos (not OpenAI's: go on behind an end token), n, stream,
 * stream_options.include_usage, user. Others are refused by name, unless they carry the value
 * that changes nothing (null, echo=false, best_of=1, penalties 0).
 *
 * All of @err is UTF-8.
 * Return: 0; -EINVAL refused; -ENOMEM.
 */
int eng_params_parse(const char *body, size_t nr_bytes, const char *model_name,
		     const struct eng_model *m, struct eng_job_params *ret,
		     struct eng_api_error *err);

#endif /* ENG_HTTP_PARAMS_H */
